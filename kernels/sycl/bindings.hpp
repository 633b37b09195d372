// The parts of the module `pearl._sycl`: each function adds its classes.
#pragma once

#include <pybind11/pybind11.h>

namespace pearl::device {

void bind_fpga_learner(pybind11::module_& module);
void bind_fpga_replay(pybind11::module_& module);
void bind_learner(pybind11::module_& module);
void bind_queue(pybind11::module_& module);
void bind_column_store(pybind11::module_& module);
void bind_sum_tree_replay(pybind11::module_& module);

}  // namespace pearl::device
