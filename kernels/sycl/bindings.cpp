// The module pearl._sycl: primitives on SYCL devices. Only pearl.backends.sycl.runtime loads it, after the runtime.
#include "bindings.hpp"

#include "dpctl4pybind11.hpp"
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>

#include "device_queue.hpp"
#include "pearl/python_errors.hpp"
#include "probe.hpp"
#include "sources.hpp"

namespace py = pybind11;

namespace pearl::device {

namespace {

py::array_t<float> shared_floats(DeviceQueue& queue, std::size_t count) {
  auto memory = std::make_unique<DeviceArray<float>>(queue, count, Placement::shared);
  float* data = memory->data();
  const py::capsule owner(memory.release(), [](void* held) { delete static_cast<DeviceArray<float>*>(held); });
  return {{static_cast<py::ssize_t>(count)}, {static_cast<py::ssize_t>(sizeof(float))}, data, owner};
}

}  // namespace

void bind_queue(py::module_& module) {
  py::class_<DeviceQueue, std::shared_ptr<DeviceQueue>>(module, "Queue", "An in-order queue of one device.")
      .def(py::init<sycl::queue>(), py::arg("queue"), "From a dpctl.SyclQueue, which must be in-order.")
      .def_property_readonly("name", &DeviceQueue::name, "The device's own name.")
      .def_property_readonly("launches", &DeviceQueue::launches, "Kernels launched so far.")
      .def(
          "compile",
          [](DeviceQueue& self, const std::string& name, const std::string& text,
             const std::vector<std::string>& kernels) { self.compile_text(name, text, kernels); },
          py::arg("name"), py::arg("text"), py::arg("kernels"), py::call_guard<py::gil_scoped_release>(),
          "Compile the SYCL C++ source `text`; DeviceError with the compiler's log if that fails.")
      .def("wait", &DeviceQueue::wait, py::call_guard<py::gil_scoped_release>(),
           "Wait for all launched kernels.")
      .def("shared_floats", &shared_floats, py::arg("count"),
           "A new array `(count,)` float32 of zeros in memory that the host and the device share.")
      .def("launch_times_us", &launch_times_us, py::arg("launches"), py::arg("repeats"),
           py::call_guard<py::gil_scoped_release>(),
           "Microseconds of `repeats` runs of `launches` empty kernels with one wait.")
      .def("memory_times_us", &memory_times_us, py::arg("nbytes"), py::arg("repeats"),
           py::call_guard<py::gil_scoped_release>(),
           "Microseconds of `repeats` copies of `nbytes` within the device's memory, each waited for.")
      .def("copy_times_us", &copy_times_us, py::arg("nbytes"), py::arg("to_device"), py::arg("repeats"),
           py::call_guard<py::gil_scoped_release>(),
           "Microseconds of `repeats` copies of `nbytes` between host and device, each waited for.");
}

}  // namespace pearl::device

PYBIND11_MODULE(_sycl, module) {
  module.doc() = "PEARL's primitives on SYCL devices.";
  module.attr("SYCL_VERSION") = std::to_string(__LIBSYCL_MAJOR_VERSION) + "." + std::to_string(__LIBSYCL_MINOR_VERSION);
  module.attr("SOURCES_HASH") = pearl::device::device_sources_hash();
  py::module_::import("dpctl");
  py::register_local_exception_translator(&pearl::translate_exception);
  pearl::device::bind_queue(module);
  pearl::device::bind_learner(module);
  pearl::device::bind_column_store(module);
  pearl::device::bind_sum_tree_replay(module);
  pearl::device::bind_fpga_replay(module);
  pearl::device::bind_fpga_learner(module);
}
