#include "pearl/device/bindings.hpp"

#include <cstdint>
#include <memory>

#include <pybind11/stl.h>

#include "pearl/device/probe.hpp"
#include "pearl/device/queue.hpp"

namespace pearl::device {
namespace {

py::array_t<float> shared_floats(DeviceQueue& queue, std::size_t count) {
  auto memory = std::make_unique<DeviceArray<float>>(queue, count, Placement::shared);
  float* data = memory->data();
  const py::capsule owner(memory.release(), [](void* held) { delete static_cast<DeviceArray<float>*>(held); });
  return {{static_cast<py::ssize_t>(count)}, {static_cast<py::ssize_t>(sizeof(float))}, data, owner};
}

}  // namespace

void bind_device_queue(py::module_& module) {
  using bindings::Released;
  py::class_<DeviceView>(module, "DeviceView", py::module_local(), "An array in memory that the device reaches.")
      .def_property_readonly("__cuda_array_interface__", [](const DeviceView& view) {
        py::dict out;
        out["shape"] = py::tuple(py::cast(view.shape));
        out["typestr"] = view.type;
        out["data"] = py::make_tuple(reinterpret_cast<std::uintptr_t>(view.data), false);
        out["version"] = 3;
        return out;
      });
  py::class_<DeviceQueue, std::shared_ptr<DeviceQueue>>(module, "DeviceQueue", py::module_local(),
                                                        "An in-order queue of one device.")
      .def_property_readonly("name", &DeviceQueue::name, "The device's own name.")
      .def_property_readonly("launches", &DeviceQueue::launches, "Kernels launched so far.")
      .def("wait", &DeviceQueue::wait, py::call_guard<Released>(), "Wait for all launched kernels.")
      .def("shared_floats", &shared_floats, py::arg("count"),
           "A new array `(count,)` float32 of zeros in memory that the host and the device share.")
      .def(
          "device_floats",
          [](DeviceQueue& queue, std::size_t count) {
            const DeviceArray<float> array(queue, count, Placement::device);
            return DeviceView{array.memory(), array.data(), "<f4", {static_cast<py::ssize_t>(count)}};
          },
          py::arg("count"), "A new array `(count,)` float32 of zeros in the device's memory.")
      .def("launch_times_us", &launch_times_us, py::arg("launches"), py::arg("repeats"), py::call_guard<Released>(),
           "Microseconds of `repeats` runs of `launches` empty kernels with one wait.")
      .def("memory_times_us", &memory_times_us, py::arg("nbytes"), py::arg("repeats"), py::call_guard<Released>(),
           "Microseconds of `repeats` copies of `nbytes` within the device's memory, each waited for.")
      .def("copy_times_us", &copy_times_us, py::arg("nbytes"), py::arg("to_device"), py::arg("repeats"),
           py::arg("pinned") = false, py::call_guard<Released>(),
           "Microseconds of `repeats` copies of `nbytes` between the host's pageable or pinned memory and the device, each "
           "waited for.");
}

}  // namespace pearl::device
