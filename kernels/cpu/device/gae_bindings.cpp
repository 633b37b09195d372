#include "pearl/device/bindings.hpp"

#include <memory>

#include "pearl/device/gae.hpp"
#include "pearl/gae_python.hpp"

namespace pearl::device {

void bind_gae(py::module_& module) {
  py::class_<Gae, std::shared_ptr<Gae>> cls(module, "Gae", py::module_local(),
                                            "Generalized advantage estimation on a queue's device.");
  cls.def(py::init([](const std::shared_ptr<DeviceQueue>& queue, double gamma, double gae_lambda) {
            const bindings::Released released;
            return std::make_shared<Gae>(queue, gamma, gae_lambda);
          }),
          py::arg("queue").none(false), py::arg("gamma"), py::arg("gae_lambda"));
  bindings::bind_gae_methods<Gae, 0>(cls);
}

}  // namespace pearl::device
