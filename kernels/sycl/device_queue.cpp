#include "device_queue.hpp"

#include <algorithm>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>
#include <utility>

#include "sources.hpp"

namespace pearl::device {
namespace {

namespace experimental = sycl::ext::oneapi::experimental;

// Without device libraries: the compiler in the runtime's wheel finds none, and the kernels need none.
constexpr const char* kNoDeviceLibraries = "-fno-sycl-device-lib=all";
// The compiler keeps the headers it is given under its working folder, where those that include others look for them.
constexpr const char* kHeadersHere = "-I.";

// On a processor a work-group is one thread, whose vectors take lanes by the sixteen.
constexpr std::size_t kCpuLanes = 128;
constexpr std::size_t kGroupLanes = 512;

constexpr int kLogLines = 60;

const char* aspect_name(sycl::aspect aspect) {
  switch (aspect) {
    case sycl::aspect::fp64: return "fp64 (double precision)";
    case sycl::aspect::atomic64: return "atomic64 (64-bit atomics)";
    case sycl::aspect::usm_device_allocations: return "usm_device_allocations";
    case sycl::aspect::usm_host_allocations: return "usm_host_allocations";
    case sycl::aspect::usm_shared_allocations: return "usm_shared_allocations";
    default: return "an aspect";
  }
}

const char* placement_name(Placement placement) {
  return placement == Placement::device ? "device" : placement == Placement::shared ? "shared" : "pinned host";
}

sycl::aspect placement_aspect(Placement placement) {
  return placement == Placement::device   ? sycl::aspect::usm_device_allocations
         : placement == Placement::shared ? sycl::aspect::usm_shared_allocations
                                          : sycl::aspect::usm_host_allocations;
}

std::string gigabytes(std::size_t bytes) {
  const double amount = static_cast<double>(bytes) / 1e9;
  std::ostringstream text;
  text << std::fixed << std::setprecision(amount < 10 ? 2 : amount < 100 ? 1 : 0) << amount << " GB";
  return text.str();
}

// What a compiler says, as far as people read it: one error in a header of SYCL may bring a thousand lines.
std::string shortened(const std::string& log) {
  std::size_t end = 0;
  for (int line = 0; line < kLogLines; ++line) {
    end = log.find('\n', end);
    if (end == std::string::npos) return log;
    ++end;
  }
  const auto more = std::count(log.begin() + static_cast<std::ptrdiff_t>(end), log.end(), '\n');
  return more == 0 ? log : log.substr(0, end) + "... and " + std::to_string(more) + " more lines";
}

std::shared_ptr<const Kernels> build(const sycl::queue& queue, const std::string& device, const std::string& source,
                                     const std::string& text, const std::vector<KernelNeeds>& kernels,
                                     std::vector<std::string> options) {
  for (const KernelNeeds& kernel : kernels)
    for (const sycl::aspect aspect : kernel.aspects)
      if (!queue.get_device().has(aspect))
        throw DeviceError("The kernel " + std::string(kernel.name) + " of " + source + " cannot run on " + device +
                          ": the device lacks " + aspect_name(aspect) + ". Place this primitive on another device.");
  experimental::include_files headers;
  for (const SourceFile& header : device_headers()) headers.add(header.name, header.text);
  options.insert(options.end(), {kNoDeviceLibraries, kHeadersHere, "-std=c++20"});
  std::string log;
  std::vector<std::string> names;
  std::vector<sycl::kernel> found;
  try {
    auto bundle = experimental::create_kernel_bundle_from_source(
        queue.get_context(), experimental::source_language::sycl, text, experimental::properties{headers});
    auto built = experimental::build(bundle, {queue.get_device()},
                                     experimental::properties{experimental::save_log{&log},
                                                              experimental::build_options{options}});
    for (const KernelNeeds& kernel : kernels) {
      if (!built.ext_oneapi_has_kernel(kernel.name))
        throw DeviceError("The kernel " + std::string(kernel.name) + " of " + source + " cannot run on " + device +
                          ": the device's compiler left it out, as it does with what the device lacks. Place this "
                          "primitive on another device." + (log.empty() ? "" : "\n" + shortened(log)));
      names.emplace_back(kernel.name);
      found.push_back(built.ext_oneapi_get_kernel(kernel.name));
    }
  } catch (const sycl::exception& error) {
    throw DeviceError("The kernels of " + source + " do not compile for " + device + ".\n" +
                      shortened(error.what() + (log.empty() ? "" : "\n" + log)));
  }
  return std::make_shared<const Kernels>(std::move(names), std::move(found));
}

// What was compiled in this process. A failure is not kept: it is tried again.
struct Compiled {
  std::mutex mutex;
  std::map<std::tuple<std::size_t, std::size_t, std::string, std::vector<std::string>>, std::shared_ptr<const Kernels>>
      kernels;
};

Compiled& compiled() {
  static auto* instance = new Compiled;  // never destroyed: the runtime may be gone by then
  return *instance;
}

}  // namespace

Kernels::Kernels(std::vector<std::string> names, std::vector<sycl::kernel> kernels)
    : names_(std::move(names)), kernels_(std::move(kernels)) {}

const sycl::kernel& Kernels::operator[](const char* name) const {
  const auto at = std::find(names_.begin(), names_.end(), name);
  if (at == names_.end()) throw DeviceError("There is no kernel " + std::string(name) + " among those compiled.");
  return kernels_[static_cast<std::size_t>(at - names_.begin())];
}

WaitingForFpga::WaitingForFpga(const sycl::device& device) {
  if (device.is_accelerator()) lock_ = std::shared_lock(mutex());
}

std::shared_mutex& WaitingForFpga::mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

DeviceQueue::DeviceQueue(sycl::queue queue) : queue_(std::move(queue)), cpu_(queue_.get_device().is_cpu()) {
  const std::size_t most = queue_.get_device().get_info<sycl::info::device::max_work_group_size>();
  most_lanes_ = std::min(most, cpu_ ? kCpuLanes : kGroupLanes);
  const std::size_t units = queue_.get_device().get_info<sycl::info::device::max_compute_units>();
  most_groups_ = std::max<std::size_t>(cpu_ ? units : 4 * units, 1);
  if (!queue_.is_in_order())
    throw DeviceError("PEARL's kernels follow one another: the queue of " + name() + " must be in-order.");
}

std::string DeviceQueue::name() const { return queue_.get_device().get_info<sycl::info::device::name>(); }

std::shared_ptr<const Kernels> DeviceQueue::compile(const std::string& source, const std::vector<KernelNeeds>& kernels,
                                                    const std::vector<std::string>& options) {
  const std::string file = source + ".sycl.cpp";
  for (const SourceFile& candidate : device_sources())
    if (candidate.name == file) return compile_text(file, candidate.text, kernels, options);
  throw DeviceError("There is no kernel source " + file + ".");
}

std::shared_ptr<const Kernels> DeviceQueue::compile_text(const std::string& source, const std::string& text,
                                                         const std::vector<KernelNeeds>& kernels,
                                                         const std::vector<std::string>& options) {
  Compiled& known = compiled();
  const std::lock_guard lock(known.mutex);
  const auto key = std::make_tuple(std::hash<sycl::context>{}(queue_.get_context()),
                                   std::hash<sycl::device>{}(queue_.get_device()), text, options);
  auto& found = known.kernels[key];
  if (found == nullptr) found = build(queue_, name(), source, text, kernels, options);
  return found;
}

std::shared_ptr<const Kernels> DeviceQueue::compile_own(const std::string& source, const std::string& text,
                                                        const std::vector<KernelNeeds>& kernels) {
  return build(queue_, name(), source, text, kernels, {});
}

std::unique_ptr<DeviceQueue> DeviceQueue::sibling() const {
  return std::make_unique<DeviceQueue>(
      sycl::queue(queue_.get_context(), queue_.get_device(), sycl::property::queue::in_order{}));
}

std::size_t DeviceQueue::lanes(std::size_t count) const {
  constexpr std::size_t kStep = 16;
  return std::min(most_lanes_, (std::max<std::size_t>(count, 1) + kStep - 1) / kStep * kStep);
}

void DeviceQueue::copy(const void* from, void* to, std::size_t bytes) {
  if (bytes == 0) return;
  const WaitingForFpga waiting(queue_.get_device());
  guard([&] { queue_.memcpy(to, from, bytes).wait_and_throw(); });
}

void DeviceQueue::wait() {
  const WaitingForFpga waiting(queue_.get_device());
  guard([&] { queue_.wait_and_throw(); });
}

void DeviceQueue::rethrow(const sycl::exception& error) const {
  throw DeviceError("The device " + name() + " failed: " + error.what() +
                    ". If it has disappeared or was reset, start again; `pearl devices` lists what can be used.");
}

RawMemory::RawMemory(DeviceQueue& queue, std::size_t bytes, Placement placement)
    : queue_(std::make_shared<sycl::queue>(queue.sycl())), bytes_(bytes) {
  const sycl::device device = queue_->get_device();
  if (!device.has(placement_aspect(placement)))
    throw DeviceError("The device " + queue.name() + " has no " + placement_name(placement) +
                      " memory that kernels can use: it lacks " + aspect_name(placement_aspect(placement)) + ".");
  const std::size_t most = device.get_info<sycl::info::device::max_mem_alloc_size>();
  const std::string where = std::string(" of ") + placement_name(placement) + " memory on " + queue.name();
  if (bytes > most)
    throw DeviceError(gigabytes(bytes) + where + " were asked for; it takes at most " + gigabytes(most) +
                      " in one piece. Lower the size of the replay, or place it on another device.");
  try {
    const std::size_t wanted = std::max<std::size_t>(bytes, 1);
    data_ = placement == Placement::device   ? sycl::aligned_alloc_device(64, wanted, *queue_)
            : placement == Placement::shared ? sycl::aligned_alloc_shared(64, wanted, *queue_)
                                             : sycl::aligned_alloc_host(64, wanted, *queue_);
    if (data_ == nullptr)
      throw DeviceError(gigabytes(bytes) + where + " were asked for; it does not have them free. Lower the size of the " +
                        "replay, or place it on another device.");
    const WaitingForFpga waiting(device);
    queue_->memset(data_, 0, wanted).wait_and_throw();
  } catch (const sycl::exception& error) {
    if (data_ != nullptr) sycl::free(data_, *queue_);
    throw DeviceError(gigabytes(bytes) + where + " cannot be had: " + error.what());
  }
}

RawMemory::RawMemory(RawMemory&& other) noexcept
    : queue_(std::move(other.queue_)), data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

RawMemory& RawMemory::operator=(RawMemory&& other) noexcept {
  std::swap(queue_, other.queue_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

RawMemory::~RawMemory() {
  if (data_ == nullptr) return;
  try {
    const WaitingForFpga waiting(queue_->get_device());
    queue_->wait();
    sycl::free(data_, *queue_);
  } catch (const sycl::exception&) {  // a device that is gone has taken its memory along
  }
}

}  // namespace pearl::device
