#include "pearl/device/bindings.hpp"

#include <cstdint>
#include <memory>
#include <string>

#include "pearl/device/queue.hpp"
#include "pearl/replay_autorun.hpp"
#include "pearl/replay_python.hpp"
#include "pearl/device/sum_tree_replay.hpp"

namespace pearl::device {
namespace {

const BatchMemory& launched(const SumTreeReplay& tree) {
  const BatchMemory* batch = tree.device_batch();
  if (batch == nullptr) throw ReplayError("Nothing was drawn on the device: call launch_sample first.");
  return *batch;
}

}  // namespace

void bind_sum_tree_replay(py::module_& module) {
  using namespace bindings;
  using Tree = SumTreeReplay;
  py::class_<Tree, std::shared_ptr<Tree>> cls(module, "SumTree", py::module_local(), "The Replay Manager on a queue's device.");
  cls.attr("INITIAL_MAX") = kInitialMax;
  cls.def(py::init([](const std::shared_ptr<DeviceQueue>& queue, std::int64_t capacity, unsigned fanout,
                      const std::string& mode, double alpha, std::uint64_t seed, bool stratified,
                      float initial_priority, float priority_epsilon) {
            ReplayOptions options;
            options.selection = selection_of(mode);
            options.stratified = stratified;
            options.initial_priority = initial_priority;
            options.priority_epsilon = priority_epsilon;
            const Released released;
            return std::make_shared<Tree>(queue, capacity, fanout, alpha, seed, options);
          }),
          py::arg("queue"), py::arg("capacity"), py::arg("fanout"), py::arg("mode"), py::arg("alpha"),
          py::arg("seed"), py::arg("stratified") = true, py::arg("initial_priority") = kInitialMax,
          py::arg("priority_epsilon") = 0.0f)
      .def(
          "launch_sample",
          [](Tree& tree, std::size_t count, double beta, const std::shared_ptr<ColumnStore>& columns) {
            tree.launch_sample(count, beta, columns.get());
          },
          py::arg("batch_size"), py::arg("beta"), py::arg("columns") = nullptr, py::call_guard<Released>(),
          "Launch a draw and the gathering of its rows into device memory, without waiting.")
      .def(
          "launch_update",
          [](Tree& tree, const Array<float>& priorities) {
            const BatchMemory& batch = launched(tree);
            rows(priorities, "priorities", static_cast<py::ssize_t>(batch.count()));
            const float* values = priorities.data();
            if (!tree.queue()->reaches(values))
              throw ReplayError("priorities must lie in memory that the device shares: use Queue.shared_floats.");
            const Released released;
            tree.launch_update(batch.indices(), values, batch.generations(), batch.count());
          },
          py::arg("priorities").noconvert(),
          "Launch an update of the batch of launch_sample, without waiting; `priorities` (n,) of Queue.shared_floats.")
      .def(
          "read_batch",
          [](Tree& tree) {
            const BatchMemory& batch = launched(tree);
            const auto count = static_cast<py::ssize_t>(batch.count());
            auto indices = new_vector<std::int64_t>(count);
            auto weights = new_vector<float>(count);
            auto generations = new_vector<std::uint32_t>(count);
            tree.queue()->copy(batch.indices(), indices.mutable_data(), batch.count() * sizeof(std::int64_t));
            tree.queue()->copy(batch.weights(), weights.mutable_data(), batch.count() * sizeof(float));
            tree.queue()->copy(batch.generations(), generations.mutable_data(), batch.count() * sizeof(std::uint32_t));
            return py::make_tuple(std::move(indices), std::move(weights), std::move(generations));
          },
          "Copies of the batch of launch_sample: indices, weights, generations.")
      .def(
          "start_autorun",
          [](Tree& tree, std::size_t max_batch, std::size_t depth) {
            return std::make_unique<ReplayAutorun>(tree, max_batch, depth);
          },
          py::arg("max_batch"), py::arg("depth"), py::keep_alive<0, 1>(),
          "Start a native thread that serves requests on this replay until stopped: a pearl._native.ReplayAutorun.")
      .def("check", &Tree::check, py::call_guard<Released>(),
           "Wait; ReplayError or PriorityError if the device refused an update.");
  bind_update(cls);
  bind_replay_methods(cls);
}

}  // namespace pearl::device
