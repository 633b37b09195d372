// The module pearl._sycl: primitives on SYCL devices. Only pearl.backends.sycl.runtime loads it, after the runtime.
#include "bindings.hpp"

#include "dpctl4pybind11.hpp"
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>

#include "sycl_queue.hpp"
#include "pearl/python_errors.hpp"
#include "pearl/python_threads.hpp"
#include "pearl/device/sources.hpp"

namespace py = pybind11;

namespace pearl::device {

void bind_queue(py::module_& module) {
  py::class_<SyclQueue, DeviceQueue, std::shared_ptr<SyclQueue>>(module, "Queue",
                                                                 "An in-order queue of one SYCL device.")
      .def(py::init<sycl::queue, std::size_t>(), py::arg("queue"), py::arg("kernels_at_once") = 0,
           "From a dpctl.SyclQueue, which must be in-order. The device runs `kernels_at_once` (0: any number).")
      .def(
          "compile",
          [](SyclQueue& self, const std::string& name, const std::string& text,
             const std::vector<std::string>& kernels) { self.compile_text(name, text, kernels); },
          py::arg("name"), py::arg("text"), py::arg("kernels"), py::call_guard<bindings::Released>(),
          "Compile the SYCL C++ source `text`; DeviceError with the compiler's log if that fails.");
}

}  // namespace pearl::device

PYBIND11_MODULE(_sycl, module) {
  module.doc() = "PEARL's primitives on SYCL devices.";
  module.attr("SYCL_VERSION") = std::to_string(__LIBSYCL_MAJOR_VERSION) + "." + std::to_string(__LIBSYCL_MINOR_VERSION);
  module.attr("SOURCES_HASH") = pearl::device::device_sources_hash();
  py::module_::import("dpctl");
  py::register_local_exception_translator(&pearl::translate_exception);
  pearl::device::bind_device_queue(module);
  pearl::device::bind_queue(module);
  pearl::device::bind_learner(module);
  pearl::device::bind_column_store(module);
  pearl::device::bind_gae(module);
  pearl::device::bind_sum_tree_replay(module);
  pearl::device::bind_fpga_gae(module);
  pearl::device::bind_fpga_replay(module);
  pearl::device::bind_fpga_learner(module);
}
