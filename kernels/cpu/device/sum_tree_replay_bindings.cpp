#include "pearl/device/bindings.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "pearl/device/queue.hpp"
#include "pearl/replay_autorun.hpp"
#include "pearl/replay_python.hpp"
#include "pearl/device/sum_tree_replay.hpp"

namespace pearl::device {
namespace {

using bindings::Array;
using bindings::Released;
using bindings::rows;

const BatchMemory& launched(const SumTreeReplay& tree) {
  const BatchMemory* batch = tree.device_batch();
  if (batch == nullptr) throw ReplayError("Nothing was drawn on the device: call prepare_iteration first.");
  return *batch;
}

std::vector<double> times_us(SumTreeReplay& tree, std::size_t count, const std::optional<Array<float>>& priorities,
                             std::size_t launches, std::size_t repeats) {
  if (priorities) {
    rows(*priorities, "priorities", static_cast<py::ssize_t>(count));
    if (!tree.queue()->reaches(priorities->data()))
      throw ReplayError("priorities must lie in memory that the device shares: use Queue.shared_floats.");
  }
  const float* const values = priorities ? priorities->data() : nullptr;
  const Released released;
  DeviceQueue& queue = *tree.queue();
  const auto launch = [&] {
    for (std::size_t place = 0; place < launches; ++place) {
      if (values == nullptr) {
        tree.launch_draw(place, count);
      } else {
        const BatchMemory& batch = *tree.device_batch();
        tree.launch_update(batch.indices(), values, batch.generations(), count);
      }
    }
  };
  const auto prepare = [&] {
    tree.check();
    tree.prepare_draws(launches, count, 0.4);
    tree.launch_draw(0, count);
    queue.wait();
  };
  prepare();
  launch();  // drivers load kernels when they are first launched
  queue.wait();
  const std::unique_ptr<const Recording> recording = queue.records() ? queue.record(launch) : nullptr;
  std::vector<double> times;
  for (std::size_t run = 0; run <= repeats; ++run) {
    prepare();
    const auto begin = std::chrono::steady_clock::now();
    if (recording != nullptr)
      queue.launch(*recording);
    else
      launch();
    queue.wait();
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    if (run > 0) times.push_back(taken.count() / static_cast<double>(launches));  // the first warms up
  }
  tree.check();
  return times;
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
          py::arg("queue").none(false), py::arg("capacity"), py::arg("fanout"), py::arg("mode"), py::arg("alpha"),
          py::arg("seed"), py::arg("stratified") = true, py::arg("initial_priority") = kInitialMax,
          py::arg("priority_epsilon") = 0.0f)
      .def("prepare_iteration", &Tree::prepare_iteration, py::arg("batch_size"), py::arg("beta"),
           py::call_guard<Released>(),
           "Work out the next draw for launch_draw, or for a recording of it, and count the update that is to follow.")
      .def(
          "launch_draw",
          [](Tree& tree, const std::shared_ptr<ColumnStore>& columns) {
            const std::size_t count = launched(tree).count();
            const Released released;
            tree.launch_draw(0, count, columns.get());
          },
          py::arg("columns") = nullptr,
          "Launch the draw of prepare_iteration, and the gathering of its rows into device memory, without waiting.")
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
          "Launch an update of the batch of launch_draw, without waiting; `priorities` (n,) of Queue.shared_floats.")
      .def(
          "launch_update_there",
          [](Tree& tree, const DeviceView& priorities) {
            const BatchMemory& batch = launched(tree);
            if (priorities.type != "<f4" || priorities.shape != std::vector<py::ssize_t>{static_cast<py::ssize_t>(batch.count())})
              throw ReplayError("priorities must be " + std::to_string(batch.count()) + " numbers of Queue.device_floats.");
            const Released released;
            tree.launch_update(batch.indices(), static_cast<const float*>(priorities.data), batch.generations(), batch.count());
          },
          py::arg("priorities"), "The same with `priorities` (n,) of Queue.device_floats.")
      .def(
          "draw_there",
          [](Tree& tree) {
            const BatchMemory& batch = launched(tree);
            const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(batch.count())};
            const auto& memory = batch.block().memory();
            return py::make_tuple(DeviceView{memory, batch.indices(), "<i8", shape},
                                  DeviceView{memory, batch.weights(), "<f4", shape});
          },
          "Where launch_draw writes slots and importance weights, in the device's memory.")
      .def("times_us", &times_us, py::arg("batch_size"), py::arg("priorities").noconvert(), py::arg("launches"),
           py::arg("repeats"),
           "Microseconds of a draw or, with `priorities` of Queue.shared_floats, of an update, in each of `repeats` runs of "
           "`launches`: as loops launch them, recorded where the device does so.")
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
          "Copies of the batch of launch_draw: indices, weights, generations.")
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
