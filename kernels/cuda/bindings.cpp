// The module pearl._cuda: primitives on CUDA devices, and on the emulator of their kernels. It is built without CUDA;
// pearl.backends.cuda.runtime says where the driver's and NVRTC's libraries are.
#include "pearl/device/bindings.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_queue.hpp"
#include "emulated_queue.hpp"
#include "pearl/device/portable.hpp"
#include "pearl/device/sources.hpp"
#include "pearl/python_errors.hpp"

namespace pearl::device {
namespace {

emulator::Order order_of(const std::string& name) {
  if (name == "ascending") return emulator::Order::ascending;
  if (name == "descending") return emulator::Order::descending;
  if (name == "shuffled") return emulator::Order::shuffled;
  throw DeviceError("The order of threads is 'ascending', 'descending' or 'shuffled'; found '" + name + "'.");
}

void bind_queues(py::module_& module) {
  using bindings::Released;
  py::class_<CudaQueue, DeviceQueue, std::shared_ptr<CudaQueue>>(module, "Queue", py::module_local(),
                                                                 "A stream of one CUDA device.")
      .def(py::init([](int index, std::string compiler, std::string cache) {
             const Released released;
             return std::make_shared<CudaQueue>(index, CudaCompiler{std::move(compiler), std::move(cache)});
           }),
           py::arg("index"), py::arg("compiler"), py::arg("cache"),
           "On device `index`; `compiler` is the path of NVRTC, `cache` a folder for compiled kernels or \"\".")
      .def_property_readonly("shares_memory", &CudaQueue::shares_memory,
                             "Whether host and kernels may use managed memory at the same time.")
      .def_property_readonly(
          "stream", [](const CudaQueue& queue) { return reinterpret_cast<std::uintptr_t>(queue.stream()); },
          "The address of the CUDA stream that everything is launched on, for other libraries.")
      .def(
          "record_on",
          [](CudaQueue& queue, std::uintptr_t stream, const py::function& work) {
            queue.record_on(reinterpret_cast<cuda::Stream>(stream), [&] { work(); });
          },
          py::arg("stream"), py::arg("work"),
          "Call work(), whose launches go to the CUDA stream at this address: for one that another library records.")
      .def(
          "write_out_of_bounds",
          [](CudaQueue& queue) {
            constexpr std::int32_t kItems = 64;
            const DeviceArray<std::int32_t> x(queue, kItems, Placement::device);
            const auto kernels = queue.compile("control", {"pearl_write_out_of_bounds"});
            queue.launch((*kernels)["pearl_write_out_of_bounds"], 1, 1, x.data(), 1 << 24);
            queue.wait();
          },
          "Write beyond an array, which compute-sanitizer must find.");
  py::class_<EmulatedQueue, DeviceQueue, std::shared_ptr<EmulatedQueue>>(
      module, "EmulatedQueue", py::module_local(), "CUDA's kernels on the host: functional only.")
      .def(py::init([](std::size_t most_lanes, const std::string& order, std::uint64_t seed) {
             if (most_lanes < 1 || most_lanes > kMostLanes || most_lanes % 32 != 0)
               throw DeviceError("A block has 1 to " + std::to_string(kMostLanes) + " threads; found " +
                                 std::to_string(most_lanes) + ".");
             return std::make_shared<EmulatedQueue>(most_lanes, order_of(order), seed);
           }),
           py::arg("most_lanes") = 64, py::arg("order") = "ascending", py::arg("seed") = 0,
           "Blocks of at most `most_lanes` threads; between barriers they run in this order.")
      .def(
          "control",
          [](EmulatedQueue& queue, const std::string& kernel, std::size_t blocks, std::size_t cluster) {
            constexpr std::size_t kThreads = 64;
            const DeviceArray<std::int32_t> x(queue, kThreads, Placement::pinned);
            for (std::size_t i = 0; i < kThreads; ++i) x[i] = static_cast<std::int32_t>(i);
            const LaunchShape shape{blocks, 1, kThreads, cluster, kThreads * sizeof(float)};
            queue.launch_shape((*queue.compile("controls", {kernel}))[kernel], shape, x.data());
            queue.wait();
            return std::vector<std::int32_t>(x.data(), x.data() + kThreads);
          },
          py::arg("kernel"), py::arg("blocks") = 1, py::arg("cluster") = 1,
          "0, 1, ... 63 after one of the kernels of emulator_controls.cpp.");
  module.def(
      "binary",
      [](const std::string& stem, int major, int minor, const std::vector<std::string>& options,
         const std::string& compiler) {
        std::vector<char> binary;
        {
          const Released released;
          binary = cuda_binary({compiler, ""}, stem, major, minor, options);
        }
        return py::bytes(binary.data(), binary.size());
      },
      py::arg("stem"), py::arg("major"), py::arg("minor"), py::arg("options"), py::arg("compiler"),
      "kernels/cuda/<stem>.cu compiled by NVRTC for a compute capability; needs no GPU.");
  module.def(
      "driver_release",
      [] {
        int version = 0;
        cuda::check(cuda::driver().cuDriverGetVersion(&version), "its version is not known", "driver");
        return version / 1000;
      },
      "The major release of CUDA that the driver is for; DeviceError without a driver.");
  module.def("compiler_version", &cuda::compiler_version, py::arg("compiler"), "NVRTC's release, such as '13.0'.");
}

}  // namespace
}  // namespace pearl::device

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "PEARL's primitives on CUDA devices.";
  module.attr("SOURCES_HASH") = pearl::device::device_sources_hash();
  module.attr("FINDS_RACES") = pearl::emulator::races::kFound;
  py::module_::import("pearl._native");
  py::register_local_exception_translator(&pearl::translate_exception);
  pearl::device::bind_device_queue(module);
  pearl::device::bind_queues(module);
  pearl::device::bind_column_store(module);
  pearl::device::bind_gae(module);
  pearl::device::bind_sum_tree_replay(module);
  pearl::device::bind_learner(module);
}
