// Python bindings of the choice of kernels, and of the kernels themselves for tests against NumPy.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "pearl/errors.hpp"
#include "pearl/quantise.hpp"
#include "pearl/replay_kernels.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

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

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("kernel_variants", &pearl::replay_kernel_variants);
  m.def("selected_kernels", [] { return std::string(pearl::replay_kernels().name); });
  m.def("select_kernels", &pearl::select_replay_kernels, py::arg("name"));
  m.def("quantise", &quantise, py::arg("priorities").noconvert(), py::arg("alpha"), py::arg("scale"));
  m.def("importance_weights", &importance_weights, py::arg("leaves").noconvert(), py::arg("beta"));
  m.def("stratified_targets", &stratified_targets, py::arg("seed"), py::arg("call"), py::arg("count"),
        py::arg("total"));
}
