#include "sycl_queue.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <tuple>

#include "pearl/device/portable.hpp"
#include "pearl/device/sources.hpp"

namespace pearl::device {
namespace {

namespace experimental = sycl::ext::oneapi::experimental;

// The kernels need no device libraries, and the compiler in the runtime's wheel would not find them.
constexpr const char* kNoDeviceLibraries = "-fno-sycl-device-lib=all";
// The compiler puts the given headers into its working folder: headers that include others must search there.
constexpr const char* kHeadersHere = "-I.";

// On a CPU one thread runs a work-group, 16 lanes at a time as a vector.
constexpr std::size_t kCpuLanes = 128;

struct PlacementKind {
  const char* name;
  sycl::usm::alloc kind;
  sycl::aspect aspect;
  const char* aspect_name;
};

// By Placement.
constexpr PlacementKind kPlacements[] = {
    {"device", sycl::usm::alloc::device, sycl::aspect::usm_device_allocations, "usm_device_allocations"},
    {"shared", sycl::usm::alloc::shared, sycl::aspect::usm_shared_allocations, "usm_shared_allocations"},
    {"pinned host", sycl::usm::alloc::host, sycl::aspect::usm_host_allocations, "usm_host_allocations"}};

// The file that says that the runtime's cache on disk has the compiled source; empty if there is no cache.
std::filesystem::path cached_mark(const std::string& text, const std::vector<std::string>& options) {
  const char* const persistent = std::getenv("SYCL_CACHE_PERSISTENT");
  const char* const folder = std::getenv("SYCL_CACHE_DIR");
  if (persistent == nullptr || std::string_view(persistent) != "1" || folder == nullptr) return {};
  std::string key = text;
  for (const std::string& option : options) key += '\n' + option;
  return std::filesystem::path(folder) / "sources" / std::to_string(std::hash<std::string>{}(key));
}

// Puts a new source into the runtime's cache, from where it is then built. The cache does not keep the names of values,
// so to the device's compiler a cached program differs from a newly compiled one. Without this, every program was
// compiled for the device twice: at the first start, and at the second.
template <class Bundle, class Properties>
void compile_into_cache(Bundle& source, const sycl::device& device, const Properties& properties,
                        const std::filesystem::path& mark) {
  std::error_code unknown;
  if (mark.empty() || std::filesystem::exists(mark, unknown)) return;
  experimental::compile(source, {device}, properties);
  std::filesystem::create_directories(mark.parent_path(), unknown);
  std::ofstream file(mark);  // without it, the source is compiled again, which costs time only
}

std::shared_ptr<const Kernels> build(const sycl::queue& queue, const std::string& device, const std::string& source,
                                     const std::string& text, const std::vector<std::string>& kernels,
                                     std::vector<std::string> options) {
  experimental::include_files headers;
  for (const SourceFile& header : device_headers()) headers.add(header.name, header.text);
  options.insert(options.end(), {kNoDeviceLibraries, kHeadersHere, "-std=c++20"});
  std::string log;
  Kernels::Named found;
  try {
    auto bundle = experimental::create_kernel_bundle_from_source(
        queue.get_context(), experimental::source_language::sycl, text, experimental::properties{headers});
    const experimental::properties asked{experimental::save_log{&log}, experimental::build_options{options}};
    compile_into_cache(bundle, queue.get_device(), asked, cached_mark(text, options));
    auto built = experimental::build(bundle, {queue.get_device()}, asked);
    for (const std::string& kernel : kernels) {
      if (!built.ext_oneapi_has_kernel(kernel))
        throw DeviceError("The kernel " + kernel + " of " + source + " cannot run on " + device +
                          ": the device's compiler left it out, because the device lacks something that it needs. "
                          "Place this primitive on another device." + (log.empty() ? "" : "\n" + shortened(log)));
      found.emplace_back(kernel, std::make_unique<SyclKernel>(built.ext_oneapi_get_kernel(kernel)));
    }
  } catch (const sycl::exception& error) {
    throw DeviceError("The kernels of " + source + " do not compile for " + device + ".\n" +
                      shortened(error.what() + (log.empty() ? "" : "\n" + log)));
  }
  return std::make_shared<const Kernels>(std::move(found));
}

std::size_t lanes_of(const sycl::device& device) {
  return std::min(device.get_info<sycl::info::device::max_work_group_size>(),
                  device.is_cpu() ? kCpuLanes : std::size_t{kMostLanes});
}

std::size_t groups_of(const sycl::device& device) {
  const std::size_t units = device.get_info<sycl::info::device::max_compute_units>();
  return std::max<std::size_t>(device.is_cpu() ? units : 4 * units, 1);
}

void set_argument(sycl::handler& handler, int at, const Argument& argument) {
  switch (argument.kind) {
    case Argument::Kind::pointer: return handler.set_arg(at, const_cast<void*>(argument.pointer));
    case Argument::Kind::int32: return handler.set_arg(at, argument.int32);
    case Argument::Kind::uint32: return handler.set_arg(at, argument.uint32);
    case Argument::Kind::int64: return handler.set_arg(at, argument.int64);
    case Argument::Kind::uint64: return handler.set_arg(at, argument.uint64);
    case Argument::Kind::float32: return handler.set_arg(at, argument.float32);
  }
}

// The kernels that this process has compiled. A failure is not cached: the next call tries again.
struct Compiled {
  std::mutex mutex;
  std::map<std::tuple<std::size_t, std::size_t, std::string, std::vector<std::string>>, std::shared_ptr<const Kernels>>
      kernels;
};

Compiled& compiled() {
  static auto* instance = new Compiled;  // never destroyed: the runtime may be unloaded by then
  return *instance;
}

}  // namespace

WaitingForFpga::WaitingForFpga(const sycl::device& device) {
  if (device.is_accelerator()) lock_ = std::shared_lock(mutex());
}

std::shared_mutex& WaitingForFpga::mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

SyclQueue::SyclQueue(sycl::queue queue, std::size_t kernels_at_once)
    : DeviceQueue(queue.get_device().is_cpu(), 1, lanes_of(queue.get_device()), groups_of(queue.get_device())),
      queue_(std::move(queue)),
      kernels_at_once_(kernels_at_once) {
  if (!queue_.is_in_order())
    throw DeviceError("PEARL's kernels must run in order: the queue of " + name() + " must be in-order.");
}

std::string SyclQueue::name() const { return queue_.get_device().get_info<sycl::info::device::name>(); }

std::shared_ptr<const Kernels> SyclQueue::compile(const std::string& stem, const std::vector<std::string>& kernels,
                                                  const std::vector<std::string>& options) {
  const std::string file = stem + ".sycl.cpp";
  for (const SourceFile& candidate : device_sources())
    if (candidate.name == file) return compile_text(file, candidate.text, kernels, options);
  throw DeviceError("There is no kernel source " + file + ".");
}

std::shared_ptr<const Kernels> SyclQueue::compile_text(const std::string& source, const std::string& text,
                                                         const std::vector<std::string>& kernels,
                                                         const std::vector<std::string>& options) {
  Compiled& known = compiled();
  const std::lock_guard lock(known.mutex);
  const auto key = std::make_tuple(std::hash<sycl::context>{}(queue_.get_context()),
                                   std::hash<sycl::device>{}(queue_.get_device()), text, options);
  auto& found = known.kernels[key];
  if (found == nullptr) found = build(queue_, name(), source, text, kernels, options);
  return found;
}

std::shared_ptr<const Kernels> SyclQueue::compile_own(const std::string& source, const std::string& text,
                                                        const std::vector<std::string>& kernels) {
  const char* const optimize = std::getenv("PEARL_FPGA_OPTIMIZE");
  const bool quick = optimize != nullptr && std::string_view(optimize) == "0";
  return build(queue_, name(), source, text, kernels,
               quick ? std::vector<std::string>{"-O0"} : std::vector<std::string>{});
}

std::unique_ptr<SyclQueue> SyclQueue::sibling() const {
  return std::make_unique<SyclQueue>(
      sycl::queue(queue_.get_context(), queue_.get_device(), sycl::property::queue::in_order{}));
}

void SyclQueue::copy_async(const void* from, void* to, std::size_t bytes) {
  guard([&] { queue_.memcpy(to, from, bytes); });
}

void SyclQueue::copy(const void* from, void* to, std::size_t bytes) {
  if (bytes == 0) return;
  const WaitingForFpga waiting(queue_.get_device());
  guard([&] { queue_.memcpy(to, from, bytes).wait_and_throw(); });
}

void SyclQueue::wait() {
  const WaitingForFpga waiting(queue_.get_device());
  guard([&] { queue_.wait_and_throw(); });
}

void SyclQueue::enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments,
                        std::size_t count) {
  guard([&] {
    queue_.submit([&](sycl::handler& handler) {
      for (std::size_t i = 0; i < count; ++i) set_argument(handler, static_cast<int>(i), arguments[i]);
      handler.parallel_for(sycl::nd_range<2>({shape.rows, shape.groups * shape.lanes}, {shape.rows, shape.lanes}),
                           static_cast<const SyclKernel&>(kernel).kernel);
    });
  });
}

bool SyclQueue::reaches(const void* data) const {
  return sycl::get_pointer_type(data, queue_.get_context()) != sycl::usm::alloc::unknown;
}

void SyclQueue::rethrow(const sycl::exception& error) const {
  throw DeviceError("The device " + name() + " failed: " + error.what() +
                    ". If it has disappeared or was reset, start again; `pearl devices` lists the usable devices.");
}

std::shared_ptr<void> SyclQueue::allocate(std::size_t bytes, Placement placement) {
  sycl::queue queue = queue_;
  const sycl::device device = queue.get_device();
  const PlacementKind& kind = kPlacements[static_cast<std::size_t>(placement)];
  if (!device.has(kind.aspect))
    throw DeviceError("The device " + name() + " has no " + kind.name +
                      " memory that kernels can use: it lacks " + kind.aspect_name + ".");
  const std::size_t most = device.get_info<sycl::info::device::max_mem_alloc_size>();
  const std::string wanted = gigabytes(bytes) + " of " + kind.name + " memory on " + name();
  const std::string advice = " Lower the size of the replay, or place it on another device.";
  if (bytes > most)
    throw DeviceError(wanted + " were requested; the device allocates at most " + gigabytes(most) + " in one piece." +
                      advice);
  const auto release = [queue](void* data) {
    if (data == nullptr) return;
    try {
      const WaitingForFpga waiting(queue.get_device());
      sycl::queue(queue).wait();
      sycl::free(data, queue);
    } catch (const sycl::exception&) {  // the memory of a device that is gone is gone too
    }
  };
  try {
    const std::size_t taken = std::max<std::size_t>(bytes, 1);
    std::shared_ptr<void> data(sycl::aligned_alloc(64, taken, queue, kind.kind), release);
    if (data == nullptr) throw DeviceError(wanted + " were requested; the device has less free memory." + advice);
    const WaitingForFpga waiting(device);
    queue.memset(data.get(), 0, taken).wait_and_throw();
    return data;
  } catch (const sycl::exception& error) {
    throw DeviceError(wanted + " cannot be allocated: " + error.what());
  }
}

}  // namespace pearl::device
