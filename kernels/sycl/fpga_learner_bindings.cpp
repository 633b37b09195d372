// Python bindings of the Learner on an FPGA.

#include <vector>

#include "bindings.hpp"
#include "fpga_learner.hpp"
#include "pearl/device/learner_python.hpp"

namespace pearl::device {
namespace {

using bindings::Released;
using Held = HeldLearner<FpgaLearner>;

}  // namespace

void bind_fpga_learner(py::module_& module) {
  py::class_<Held> learner(module, "FpgaLearner", "Networks of linear layers and their update rule as a pipeline.");
  bind_learner_methods<FpgaLearner, int, std::vector<std::vector<int>>, double>(
      learner, py::arg("copies") = 0, py::arg("unroll") = std::vector<std::vector<int>>{{16}},
      py::arg("timeout_s") = 120.0);
  learner
      .def("join", on_learner(&FpgaLearner::join), py::arg("replay").none(false), py::arg("storage").none(false),
           py::arg("batch_size"), "Join the Replay Manager's program; from then on `train` does the steps.")
      .def(
          "train",
          [](Held& self, std::int64_t number, double beta) {
            return as_dict(on_learner(&FpgaLearner::train)(self, number, beta));
          },
          py::arg("number"), py::arg("beta"), "Sample, train and update once, through pipes; metrics by name.")
      .def("close", on_learner(&FpgaLearner::close))
      .def("source", [](const Held& self, std::uint32_t rows) { return self.learner->source(rows); }, py::arg("rows"),
           "The program generated for batches of `rows`, with the current settings and optimizers.")
      .def_property_readonly("copies", [](const Held& self) { return self.learner->copies(); })
      .def_property_readonly("stage_launches", [](const Held& self) { return self.learner->stage_launches(); })
      .def_property_readonly("bridge_launches", [](const Held& self) { return self.learner->bridge_launches(); });
}

}  // namespace pearl::device
