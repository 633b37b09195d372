// The Python bindings that the modules of all parallel devices share: each function adds its classes to a module. The
// classes are local to their module, since several modules have them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pearl/python_arrays.hpp"

namespace pearl::device {

// An array in memory that the device reaches, for libraries that read `__cuda_array_interface__`.
struct DeviceView {
  std::shared_ptr<const void> owner;
  const void* data;
  std::string type;  // as NumPy writes it
  std::vector<py::ssize_t> shape;
};

// The base class of a module's queues, and DeviceView.
void bind_device_queue(pybind11::module_& module);
void bind_column_store(pybind11::module_& module);
void bind_gae(pybind11::module_& module);
void bind_sum_tree_replay(pybind11::module_& module);
void bind_learner(pybind11::module_& module);

// The update() of a Replay Manager.
template <class Tree, class... Options>
void bind_update(py::class_<Tree, Options...>& cls) {
  using namespace bindings;
  cls.def(
      "update",
      [](Tree& tree, const Array<std::int64_t>& indices, const Array<float>& priorities,
         const std::optional<Array<std::uint32_t>>& generations) {
        const std::size_t count = rows(indices, "indices");
        rows(priorities, "priorities", indices.size());
        const std::uint32_t* versions = data_or_null(generations, "generations", count);
        const std::int64_t* slots = indices.data();
        const float* values = priorities.data();
        const Released released;
        return tree.update(slots, values, versions, count);
      },
      py::arg("indices").noconvert(), py::arg("priorities").noconvert(), py::arg("generations").noconvert());
}

}  // namespace pearl::device
