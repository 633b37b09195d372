#include "../bindings.hpp"

#include <string>
#include <utility>
#include <vector>

#include "pearl/device/bindings.hpp"
#include "pearl/device/learner_python.hpp"
#include "pearl/device/training_loop.hpp"

namespace pearl::device {
namespace {

using HeldDeviceLearner = HeldLearner<DeviceLearner>;

// A training loop, and the caller's arrays that it works on.
struct HeldLoop {
  HeldLoop(HeldDeviceLearner& learner, std::shared_ptr<SumTreeReplay> replay, std::shared_ptr<ColumnStore> storage,
           std::size_t batch_size, bindings::OnBuffer<SlotQueue>& grants, bindings::OnBuffer<SlotQueue>& done,
           bindings::OnBuffer<Snapshot>& snapshot, std::vector<py::array> policy_held, std::size_t interval,
           Array<std::int64_t> steps_held)
      : policy(std::move(policy_held)),
        steps(std::move(steps_held)),
        loop(std::move(replay), std::move(storage), *learner.learner, batch_size,
             bindings::loop_queues(grants, done, snapshot), bindings::loop_weights(policy), interval, one_of(steps)) {}

  static std::int64_t* one_of(Array<std::int64_t>& steps) {
    if (steps.size() != 1)
      throw LearnerError("steps must hold one number; found " + std::to_string(steps.size()) + ".");
    return steps.mutable_data();
  }

  std::vector<py::array> policy;
  Array<std::int64_t> steps;
  DeviceLoop loop;
};

py::tuple last_batch(const HeldLoop& held) {
  py::list columns;
  for (std::size_t i = 0; i < held.loop.storage().row_bytes().size(); ++i) {
    Array<std::uint8_t> bytes(std::vector<std::size_t>{held.loop.batch_size(), held.loop.storage().row_bytes()[i]});
    held.loop.last_column(i, bytes.mutable_data());
    columns.append(bytes);
  }
  const auto rows = static_cast<py::ssize_t>(held.loop.drawn());
  Array<std::int64_t> indices(rows);
  Floats weights(rows);
  held.loop.last_draw(indices.mutable_data(), weights.mutable_data());
  return py::make_tuple(std::move(indices), std::move(weights), columns);
}

}  // namespace

void bind_learner(py::module_& module) {
  py::class_<HeldDeviceLearner> learner(module, "Learner", py::module_local(),
                                        "Networks of linear layers and their update rule on a device.");
  bind_learner_methods<DeviceLearner, int, int, int, bool>(learner, py::arg("slices") = 0,
                                                           py::arg("columns_per_tile") = 0, py::arg("block_bytes") = -1,
                                                           py::arg("branches") = true);
  learner.def_property_readonly(
      "branches", [](const HeldDeviceLearner& held) { return held.learner->branches(); },
      "How many blocks run a tape of their own each, for the last batch; 1: all run one.");

  py::class_<HeldLoop> loop(module, "TrainingLoop", py::module_local(),
                            "Setting 2 on a device, as pearl._native.TrainingLoop.");
  bindings::bind_loop_methods(loop)
      .def(py::init<HeldDeviceLearner&, std::shared_ptr<SumTreeReplay>, std::shared_ptr<ColumnStore>, std::size_t,
                    bindings::OnBuffer<SlotQueue>&, bindings::OnBuffer<SlotQueue>&, bindings::OnBuffer<Snapshot>&,
                    std::vector<py::array>, std::size_t, Array<std::int64_t>>(),
           py::arg("learner"), py::arg("replay").none(false), py::arg("storage").none(false), py::arg("batch_size"),
           py::arg("grants"), py::arg("done"), py::arg("snapshot"), py::arg("policy"), py::arg("interval"),
           py::arg("steps").noconvert(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>())
      .def("last_batch", &last_batch, "Indices, weights, and the bytes of each column's rows.")
      .def(
          "time_parts", [](HeldLoop& held, bool wanted) { held.loop.time_parts(wanted); }, py::arg("wanted"));
}

}  // namespace pearl::device
