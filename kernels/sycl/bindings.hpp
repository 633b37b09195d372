// The parts that only the module `pearl._sycl` has: each function adds its classes.
#pragma once

#include "pearl/device/bindings.hpp"

namespace pearl::device {

void bind_fpga_gae(pybind11::module_& module);
void bind_fpga_learner(pybind11::module_& module);
void bind_fpga_replay(pybind11::module_& module);
void bind_queue(pybind11::module_& module);

}  // namespace pearl::device
