// Python bindings of the Learner on an FPGA.

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "fpga_learner.hpp"
#include "learner_python.hpp"

namespace pearl::device {
namespace {

using bindings::Released;
using Held = HeldLearner<FpgaLearner>;

}  // namespace

void bind_fpga_learner(py::module_& module) {
  py::class_<Held> learner(module, "FpgaLearner", "Networks of linear layers and their update rule as a pipeline.");
  learner
      .def(py::init([](std::shared_ptr<DeviceQueue> queue, bool actor_critic, const Networks& networks,
                       const std::array<OptionalFloats, 4>& parameters, const Floats& scales,
                       std::size_t observation_size, std::size_t action_size, const OptionalFloats& log_alpha,
                       int copies, std::vector<std::vector<int>> unroll, double timeout_s) {
             const auto make = [&](const std::shared_ptr<DeviceQueue>& on, LearnerModel model) {
               const PipelineCut cut{copies, std::move(unroll), timeout_s};
               return std::make_unique<FpgaLearner>(on, std::move(model), cut);
             };
             return std::make_unique<Held>(std::move(queue), actor_critic, networks, parameters, scales,
                                           observation_size, action_size, log_alpha, make);
           }),
           py::arg("queue"), py::arg("actor_critic"), py::arg("networks"), py::arg("parameters"), py::arg("scales"),
           py::arg("observation_size"), py::arg("action_size"), py::arg("log_alpha").noconvert(), py::kw_only(),
           py::arg("copies") = 0, py::arg("unroll") = std::vector<std::vector<int>>{{16}}, py::arg("timeout_s") = 120.0)
      .def(
          "join",
          [](Held& self, const std::shared_ptr<FpgaReplay>& replay, const std::shared_ptr<ColumnStore>& storage,
             std::size_t batch_size) {
            const Released released;
            self.learner->join(replay, storage, batch_size);
          },
          py::arg("replay"), py::arg("storage"), py::arg("batch_size"),
          "Become a part of the Replay Manager's program; from then on `train` steps.")
      .def(
          "train",
          [](Held& self, std::int64_t number, double beta) {
            LearnerMetrics metrics;
            {
              const Released released;
              metrics = self.learner->train(number, beta);
            }
            return as_dict(metrics);
          },
          py::arg("number"), py::arg("beta"), "Sample, train and update once, through pipes; metrics by name.")
      .def(
          "close",
          [](Held& self) {
            const Released released;
            self.learner->close();
          })
      .def("source", [](const Held& self, std::uint32_t rows) { return self.learner->source(rows); }, py::arg("rows"),
           "The program that is generated for batches of `rows`, with the settings and optimizers of now.")
      .def_property_readonly("copies", [](const Held& self) { return self.learner->copies(); })
      .def_property_readonly("stage_launches", [](const Held& self) { return self.learner->stage_launches(); })
      .def_property_readonly("bridge_launches", [](const Held& self) { return self.learner->bridge_launches(); });
  bind_learner_methods(learner);
}

}  // namespace pearl::device
