// Python bindings of the Replay Manager: its kernels (for tests against NumPy), the sum tree, and the thread that serves
// it.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "pearl/doorbell.hpp"
#include "pearl/quantise.hpp"
#include "pearl/replay_autorun.hpp"
#include "pearl/replay_kernels.hpp"
#include "pearl/replay_python.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace {

using namespace bindings;

using Tree = pearl::SumTreeReplay;

// SumTree.update(indices, priorities, generations). Python calls it directly: pybind's dispatch takes as long as 32
// updates.
PyObject* update(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    const auto* instance = reinterpret_cast<py::detail::instance*>(self);
    auto* tree = instance->simple_layout ? static_cast<Tree*>(instance->simple_value_holder[0]) : nullptr;
    if (tree == nullptr) throw py::type_error("update() needs a SumTree that has been constructed.");
    const auto* indices = count == 3 ? array_of<std::int64_t>(arguments[0]) : nullptr;
    const auto* priorities = indices != nullptr ? array_of<float>(arguments[1]) : nullptr;
    const bool any = priorities != nullptr && arguments[2] != Py_None;
    const auto* generations = any ? array_of<std::uint32_t>(arguments[2]) : nullptr;
    if (priorities == nullptr || (any && generations == nullptr))
      throw py::type_error("update() takes contiguous arrays: int64, float32, and uint32 or None.");
    const auto wrapped = [&](int i) { return py::reinterpret_borrow<py::array>(arguments[i]); };
    if (indices->nd != 1 || priorities->nd != 1 || priorities->dimensions[0] != indices->dimensions[0]) {
      const std::size_t expected = rows(wrapped(0), "indices");
      rows(wrapped(1), "priorities", static_cast<py::ssize_t>(expected));
    }
    if (any) rows(wrapped(2), "generations", indices->dimensions[0]);
    std::size_t done;
    {
      const Released released;
      done = tree->update(reinterpret_cast<const std::int64_t*>(indices->data),
                          reinterpret_cast<const float*>(priorities->data),
                          any ? reinterpret_cast<const std::uint32_t*>(generations->data) : nullptr,
                          static_cast<std::size_t>(indices->dimensions[0]));
    }
    return PyLong_FromSize_t(done);
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }
}

Array<std::uint32_t> quantise(const Array<float>& priorities, double alpha, int scale) {
  const auto count = static_cast<std::size_t>(priorities.size());
  pearl::check_exponent("alpha", alpha);
  if (scale < -1024 || scale > 1024)
    throw pearl::ReplayError("scale must lie in [-1024, 1024]; found " + std::to_string(scale) + ".");
  pearl::check_priorities(priorities.data(), count);
  Array<std::uint32_t> leaves(priorities.size());
  pearl::replay_kernels().quantise(priorities.data(), count, pearl::exponent_q28(alpha), scale, leaves.mutable_data());
  return leaves;
}

Array<float> importance_weights(const Array<std::uint32_t>& leaves, double beta) {
  const auto count = static_cast<std::size_t>(leaves.size());
  pearl::check_exponent("beta", beta);
  for (std::size_t i = 0; i < count; ++i)
    if (leaves.data()[i] < 1 || leaves.data()[i] > pearl::kLeafMax)
      throw pearl::ReplayError("Leaves must lie in [1, 2**28); found " + std::to_string(leaves.data()[i]) + ".");
  Array<float> weights(leaves.size());
  const pearl::ReplayKernels& kernels = pearl::replay_kernels();
  const std::uint32_t smallest = kernels.smallest(leaves.data(), count);
  kernels.weights(leaves.data(), count, smallest, pearl::exponent_q28(beta), weights.mutable_data());
  return weights;
}

Array<std::uint64_t> stratified_targets(std::uint64_t seed, std::uint64_t call, py::ssize_t count,
                                        std::uint64_t total) {
  if (count < 1) throw pearl::ReplayError("count must be at least 1; found " + std::to_string(count) + ".");
  Array<std::uint64_t> targets(count);
  const auto lanes = static_cast<std::size_t>(count);
  pearl::replay_kernels().targets(seed, call, lanes, 0, lanes, total, targets.mutable_data());
  return targets;
}

void bind_kernels(py::module_& m) {
  m.def("kernel_variants", &pearl::replay_kernel_variants);
  m.def("selected_kernels", [] { return std::string(pearl::replay_kernels().name); });
  m.def("select_kernels", &pearl::select_replay_kernels, py::arg("name"));
  m.def("quantise", &quantise, py::arg("priorities").noconvert(), py::arg("alpha"), py::arg("scale"));
  m.def("importance_weights", &importance_weights, py::arg("leaves").noconvert(), py::arg("beta"));
  m.def("stratified_targets", &stratified_targets, py::arg("seed"), py::arg("call"), py::arg("count"),
        py::arg("total"));
}

void bind_sum_tree(py::module_& m) {
  py::class_<Tree> cls(m, "SumTree");
  cls.attr("INITIAL_MAX") = pearl::kInitialMax;
  cls.attr("INITIAL_MEAN") = pearl::kInitialMean;
  static PyMethodDef method = {"update", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&update)),
                               METH_FASTCALL, nullptr};
  cls.attr("update") = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls.ptr()), &method));
  cls
      .def(py::init([](std::int64_t capacity, unsigned fanout, const std::string& mode, double alpha,
                       std::uint64_t seed, bool stratified, bool replacement, std::uint32_t max_times_sampled,
                       float initial_priority, float priority_epsilon, unsigned workers) {
             return std::make_unique<Tree>(capacity, fanout, alpha, seed,
                                           pearl::ReplayOptions{bindings::selection_of(mode), stratified, replacement,
                                                                max_times_sampled, initial_priority, priority_epsilon,
                                                                workers});
           }),
           py::arg("capacity"), py::arg("fanout"), py::arg("mode"), py::arg("alpha"), py::arg("seed"),
           py::arg("stratified") = true, py::arg("replacement") = true, py::arg("max_times_sampled") = 0,
           py::arg("initial_priority") = pearl::kInitialMax, py::arg("priority_epsilon") = 0.0f,
           py::arg("workers") = 1)
      .def(
          "sample_indices",
          [](Tree& tree, py::ssize_t count) {
            const std::size_t batch = batch_rows(count);
            auto indices = new_vector<std::int64_t>(count);
            {
              const Released released;
              tree.sample(batch, 0.0, indices.mutable_data(), nullptr, nullptr);
            }
            return indices;
          },
          py::arg("batch_size"))
      .def(
          "find",
          [](Tree& tree, const Array<std::uint64_t>& targets) {
            const std::size_t count = rows(targets, "targets");
            auto indices = new_vector<std::int64_t>(targets.size());
            {
              const Released released;
              tree.find(targets.data(), indices.mutable_data(), count);
            }
            return indices;
          },
          py::arg("targets").noconvert());
  bindings::bind_replay_methods(cls);
}

void bind_autorun(py::module_& m) {
  using Autorun = pearl::ReplayAutorun;
  py::class_<Autorun>(m, "ReplayAutorun")
      .def(py::init<pearl::SumTreeReplay&, std::size_t, std::size_t>(), py::arg("sum_tree"), py::arg("max_batch"),
           py::arg("depth") = 8, py::keep_alive<1, 2>())
      .def(
          "write_sample",
          [](Autorun& autorun, py::ssize_t count, double beta, double timeout_s) {
            const std::size_t batch = batch_rows(count);
            return interruptible(timeout_s, [&](double slice) { return autorun.write_sample(batch, beta, slice); },
                                 is_true);
          },
          py::arg("batch_size"), py::arg("beta"), py::arg("timeout_s") = 0.0)
      .def(
          "write_update",
          [](Autorun& autorun, const Array<std::int64_t>& indices, const Array<float>& priorities,
             const std::optional<Array<std::uint32_t>>& generations, double timeout_s) {
            const std::size_t count = rows(indices, "indices");
            rows(priorities, "priorities", indices.size());
            const std::uint32_t* versions = data_or_null(generations, "generations", count);
            const auto write = [&](double slice) {
              return autorun.write_update(indices.data(), priorities.data(), versions, count, slice);
            };
            return interruptible(timeout_s, write, is_true);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert(), py::arg("generations").noconvert(),
          py::arg("timeout_s") = 0.0)
      .def(
          "write_insert",
          [](Autorun& autorun, const Array<std::int64_t>& indices, const std::optional<Array<float>>& priorities,
             double timeout_s) {
            const std::size_t count = rows(indices, "indices");
            const float* values = data_or_null(priorities, "priorities", count);
            const auto write = [&](double slice) {
              return autorun.write_insert(indices.data(), values, count, slice);
            };
            return interruptible(timeout_s, write, is_true);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert(), py::arg("timeout_s") = 0.0)
      .def("poll",
           [](Autorun& autorun) -> std::optional<py::tuple> {
             const auto count = static_cast<py::ssize_t>(autorun.response_size());
             if (count == 0) return std::nullopt;
             auto indices = new_vector<std::int64_t>(count);
             auto weights = new_vector<float>(count);
             auto generations = new_vector<std::uint32_t>(count);
             autorun.take_response(indices.mutable_data(), weights.mutable_data(), generations.mutable_data());
             return py::make_tuple(std::move(indices), std::move(weights), std::move(generations));
           })
      .def("pending", &Autorun::pending)
      .def(
          "drain",
          [](Autorun& autorun, double timeout_s) {
            return interruptible(timeout_s, [&](double slice) { return autorun.drain(slice); }, is_true);
          },
          py::arg("timeout_s"))
      .def("stop", &Autorun::stop, py::call_guard<Released>())
      .def("seconds",
           [](const Autorun& autorun) {
             py::dict seconds;
             seconds["sample"] = autorun.seconds(Autorun::Operation::kSample);
             seconds["update"] = autorun.seconds(Autorun::Operation::kUpdate);
             seconds["insert"] = autorun.seconds(Autorun::Operation::kInsert);
             return seconds;
           })
      .def("keep_events", &Autorun::keep_events, py::arg("most"))
      .def("events", [](const Autorun& autorun) { return listed(autorun.events()); })
      .def(
          "attach_bell", [](Autorun& autorun, OnBuffer<pearl::Doorbell>& bell) { autorun.attach_bell(&bell); },
          py::arg("bell"), py::keep_alive<1, 2>());
}

}  // namespace

void bind_replay(py::module_& m) {
  bind_kernels(m);
  bind_sum_tree(m);
  bind_autorun(m);
}
