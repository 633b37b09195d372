// Python bindings of generalized advantage estimation on the CPU.
#include <string>

#include "pearl/gae.hpp"
#include "pearl/gae_python.hpp"

namespace {

constexpr std::size_t kReleasedFrom = 1 << 16;

struct Gae {
  pearl::GaeFactors factors;
  void estimate(const pearl::GaeCall& call) const { pearl::gae_kernels().estimate(factors, call); }
};

}  // namespace

void bind_gae(py::module_& m) {
  m.def("gae_kernel_variants", &pearl::gae_kernel_variants);
  m.def("selected_gae_kernels", [] { return std::string(pearl::gae_kernels().name); });
  m.def("select_gae_kernels", &pearl::select_gae_kernels, py::arg("name"));
  py::class_<Gae> cls(m, "Gae");
  cls.def(py::init([](double gamma, double gae_lambda) { return Gae{pearl::GaeFactors::of(gamma, gae_lambda)}; }),
          py::arg("gamma"), py::arg("gae_lambda"));
  bindings::bind_gae_methods<Gae, kReleasedFrom>(cls);
}
