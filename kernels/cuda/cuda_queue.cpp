#include "cuda_queue.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <string_view>
#include <utility>

#include "pearl/device/portable.hpp"
#include "pearl/device/sources.hpp"

namespace pearl::device {

// Makes a context the calling thread's current one while this lives; other libraries find their own unchanged.
class Current {
 public:
  Current(cuda::Context context, const std::string& device) {
    cuda::check(cuda::driver().cuCtxPushCurrent_v2(context), "its context cannot be entered", device);
  }
  ~Current() {
    cuda::Context left = nullptr;
    cuda::driver().cuCtxPopCurrent_v2(&left);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

struct CudaDevice {
  int index = 0;
  cuda::Device device = 0;
  cuda::Context context = nullptr;
  std::string name;
  int major = 0, minor = 0, multiprocessors = 1;
  bool shares_memory = true;  // managed memory that the host may touch while kernels run
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Kernels>> kernels;  // by source and options

  int attribute(cuda::Attribute attribute) const {
    int value = 0;
    cuda::check(cuda::driver().cuDeviceGetAttribute(&value, attribute, device), "it does not say what it is", name);
    return value;
  }
};

namespace {

constexpr unsigned kNonBlocking = 1;        // of a stream: does not wait for the default stream
constexpr int kThisThreadOnly = 1;          // what a recording stream forbids, it forbids the thread that records
constexpr unsigned kAttachGlobal = 1;       // of managed memory
constexpr unsigned kPortableAndMapped = 3;  // of pinned memory
constexpr int kMemoryType = 2, kIsManaged = 8, kOrdinal = 9;  // attributes of a pointer
constexpr int kDeviceMemory = 2;            // a memory type
constexpr cuda::Result kOutOfMemory = 2;

class CudaKernel final : public Kernel {
 public:
  explicit CudaKernel(cuda::Function function) : function(function) {}
  const cuda::Function function;
};

class CudaRecording final : public Recording {
 public:
  CudaRecording(std::shared_ptr<CudaDevice> device, cuda::GraphExec graph) : graph(graph), device_(std::move(device)) {}
  ~CudaRecording() override {
    try {
      const Current current(device_->context, device_->name);
      cuda::driver().cuGraphExecDestroy(graph);
    } catch (const DeviceError&) {  // the graph of a device that is gone is gone too
    }
  }

  const cuda::GraphExec graph;

 private:
  const std::shared_ptr<CudaDevice> device_;
};

// The stream that takes this thread's launches while it records: not the queue's, in which other threads may launch.
thread_local cuda::Stream recording_stream = nullptr;

// Never released: the driver may be unloaded before.
std::shared_ptr<CudaDevice> device_of(int index) {
  static std::mutex mutex;
  static auto& known = *new std::map<int, std::shared_ptr<CudaDevice>>;
  const std::lock_guard lock(mutex);
  auto& found = known[index];
  if (found != nullptr) return found;
  const cuda::Driver& driver = cuda::driver();
  const std::string label = "cuda:" + std::to_string(index);
  int count = 0;
  cuda::check(driver.cuDeviceGetCount(&count), "the devices cannot be counted", label);
  if (index < 0 || index >= count)
    throw DeviceError("The device " + label + " does not exist: the driver finds " + std::to_string(count) +
                      ", numbered from 0.");
  auto made = std::make_shared<CudaDevice>();
  made->name = label;
  made->index = index;
  cuda::check(driver.cuDeviceGet(&made->device, index), "it cannot be opened", label);
  std::array<char, 256> text{};
  cuda::check(driver.cuDeviceGetName(text.data(), static_cast<int>(text.size()), made->device), "it has no name", label);
  made->name = std::string(text.data()) + " (" + label + ")";
  made->major = made->attribute(cuda::kComputeMajor);
  made->minor = made->attribute(cuda::kComputeMinor);
  made->multiprocessors = made->attribute(cuda::kMultiprocessors);
  made->shares_memory = made->attribute(cuda::kConcurrentManagedAccess) != 0;
  cuda::check(driver.cuDevicePrimaryCtxRetain(&made->context, made->device), "its context cannot be made", made->name);
  return found = made;
}

std::size_t groups_of(int index) { return 4 * static_cast<std::size_t>(device_of(index)->multiprocessors); }

std::string joined(const std::vector<std::string>& options) {
  std::string text;
  for (const std::string& option : options) text += (text.empty() ? "" : " ") + option;
  return text;
}

const SourceFile& source_of(const std::string& stem) {
  const std::string file = stem + ".cu";
  for (const SourceFile& candidate : device_sources())
    if (candidate.name == file) return candidate;
  throw DeviceError("There is no kernel source " + file + ".");
}

// FNV-1a, twice with different starts. The file holds its whole key, so that equal hashes do no harm.
std::string hashed(const std::string& text) {
  std::string name;
  for (std::uint64_t hash : {std::uint64_t{0xcbf29ce484222325u}, std::uint64_t{0x84222325cbf29ce4u}}) {
    for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
    std::array<char, 17> digits{};
    std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(hash));
    name += digits.data();
  }
  return name;
}

// A file of the cache holds all that the binary depends on, the binary, and an end that shows that nothing is missing.
std::string start_of(const std::string& key) { return "PEARL CUDA kernels 1\n" + key + "\n"; }
constexpr std::string_view kEnd = "\nend of PEARL CUDA kernels\n";

std::vector<char> read_cached(const std::filesystem::path& path, const std::string& key) {
  std::ifstream file(path, std::ios::binary);
  const std::string held{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}, start = start_of(key);
  if (held.size() < start.size() + kEnd.size() || !held.starts_with(start) || !held.ends_with(kEnd)) return {};
  return {held.begin() + static_cast<std::ptrdiff_t>(start.size()), held.end() - static_cast<std::ptrdiff_t>(kEnd.size())};
}

// Written to a temporary file and renamed, so that other processes see all of it or nothing. A full disk does no harm.
void write_cached(const std::filesystem::path& path, const std::string& key, const std::vector<char>& binary) {
  // Not the process's number alone: containers may share the folder.
  const std::filesystem::path partial =
      path.string() + "." + std::to_string(getpid()) + "." + std::to_string(std::random_device{}());
  std::error_code ignored;
  {
    std::ofstream file(partial, std::ios::binary);
    file << start_of(key) << std::string_view(binary.data(), binary.size()) << kEnd;
    file.flush();
    if (!file) {
      std::filesystem::remove(partial, ignored);
      return;
    }
  }
  std::filesystem::rename(partial, path, ignored);
  if (ignored) std::filesystem::remove(partial, ignored);
}

}  // namespace

std::vector<char> cuda_binary(const CudaCompiler& compiler, const std::string& stem, int major, int minor,
                              const std::vector<std::string>& options, Cache cache) {
  const SourceFile& source = source_of(stem);
  std::vector<std::string> given = options;
  given.push_back("--fmad=false");  // importance weights and noise have the same bits on every device
  std::filesystem::path cached;
  std::string key;
  if (!compiler.cache.empty()) {
    key = source.name + " sm_" + std::to_string(major) + std::to_string(minor) + " " + joined(given) + " NVRTC " +
          cuda::compiler_version(compiler.library) + " " + device_sources_hash();
    cached = std::filesystem::path(compiler.cache) / (hashed(key) + ".cubin");
    std::vector<char> binary = cache == Cache::read ? read_cached(cached, key) : std::vector<char>{};
    if (!binary.empty()) return binary;
  }
  std::vector<cuda::Header> headers;
  for (const SourceFile& header : device_headers()) headers.push_back({header.name, header.text});
  std::vector<char> binary = cuda::compiled(compiler.library, source.name, source.text, headers, major, minor, given);
  if (!cached.empty()) write_cached(cached, key, binary);
  return binary;
}

CudaQueue::CudaQueue(int index, CudaCompiler compiler)
    : DeviceQueue(false, kThreadTeam, kMostLanes, groups_of(index)), device_(device_of(index)), compiler_(std::move(compiler)) {
  const Current current(device_->context, name());
  cuda::check(cuda::driver().cuStreamCreate(&stream_, kNonBlocking), "a stream cannot be made", name());
}

CudaQueue::~CudaQueue() {
  try {
    const Current current(device_->context, name());
    cuda::driver().cuStreamDestroy_v2(stream_);
  } catch (const DeviceError&) {  // the stream of a device that is gone is gone too
  }
}

std::string CudaQueue::name() const { return device_->name; }

bool CudaQueue::shares_memory() const { return device_->shares_memory; }

std::shared_ptr<const Kernels> CudaQueue::compile(const std::string& stem, const std::vector<std::string>& kernels,
                                                  const std::vector<std::string>& options) {
  const std::lock_guard lock(device_->mutex);
  auto& found = device_->kernels[stem + " " + joined(options)];
  if (found != nullptr) return found;
  const Current current(device_->context, name());
  cuda::Module module = nullptr;  // never unloaded, as it is cached
  const auto load = [&](Cache cache) {
    const std::vector<char> binary = cuda_binary(compiler_, stem, device_->major, device_->minor, options, cache);
    return cuda::driver().cuModuleLoadData(&module, binary.data());
  };
  // A damaged file is compiled again.
  if (load(Cache::read) != 0) cuda::check(load(Cache::ignore), "the compiled kernels cannot be loaded", name());
  Kernels::Named made;
  for (const std::string& kernel : kernels) {
    cuda::Function function = nullptr;
    cuda::check(cuda::driver().cuModuleGetFunction(&function, module, kernel.c_str()), kernel.c_str(), name());
    made.emplace_back(kernel, std::make_unique<CudaKernel>(function));
  }
  return found = std::make_shared<const Kernels>(std::move(made));
}

void CudaQueue::enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments, std::size_t count) {
  constexpr std::size_t kMostArguments = 16;
  if (count > kMostArguments) throw DeviceError("A kernel has at most 16 arguments.");
  std::array<void*, kMostArguments> pointers{};
  // The members of Argument's union share an address.
  for (std::size_t i = 0; i < count; ++i) pointers[i] = const_cast<const void**>(&arguments[i].pointer);
  const auto cluster = static_cast<unsigned>(shape.cluster);
  const cuda::LaunchAttribute clustered{cuda::kClusterDimension, {cluster, 1, 1}};
  const cuda::LaunchConfig config{static_cast<unsigned>(shape.groups) * cluster,
                                  1,
                                  1,
                                  static_cast<unsigned>(shape.lanes),
                                  static_cast<unsigned>(shape.rows),
                                  1,
                                  static_cast<unsigned>(shape.block_bytes),
                                  recording_here ? recording_stream : stream_,
                                  &clustered,
                                  cluster > 1 ? 1u : 0u};
  const Current current(device_->context, name());
  cuda::check(cuda::driver().cuLaunchKernelEx(&config, static_cast<const CudaKernel&>(kernel).function, pointers.data(),
                                              nullptr),
              "a kernel cannot be launched", device_->name);
}

std::size_t CudaQueue::most_cluster() const {
  constexpr std::size_t kPortable = 8;  // on every device that has clusters
  return device_->major >= 9 ? kPortable : 1;
}

// Before compute capability 8.0, copies to blocks' memory would hold up those that start them.
std::size_t CudaQueue::most_block_bytes(const Kernel& kernel) const {
  if (device_->major < 8) return 0;
  const cuda::Function function = static_cast<const CudaKernel&>(kernel).function;
  const Current current(device_->context, name());
  int own = 0;
  cuda::check(cuda::driver().cuFuncGetAttribute(&own, cuda::kOwnBlockBytes, function),
              "a kernel does not say what it needs", name());
  const int most = device_->attribute(cuda::kMostBlockBytes) - own;
  if (most <= 0) return 0;
  cuda::check(cuda::driver().cuFuncSetAttribute(function, cuda::kGivenBlockBytes, most),
              "blocks cannot be given memory", name());
  return static_cast<std::size_t>(most);
}

// Half of the multiprocessors: on an H100, with a block on each of them a step of TD3 took 1.4 times as long.
std::size_t CudaQueue::most_clustered() const { return static_cast<std::size_t>(device_->multiprocessors) / 2; }

void CudaQueue::record_on(cuda::Stream stream, const std::function<void()>& work) {
  const RecordingHere recording;
  recording_stream = stream;
  work();
}

std::unique_ptr<const Recording> CudaQueue::recorded(const std::function<void()>& work) {
  const cuda::Driver& driver = cuda::driver();
  const Current current(device_->context, device_->name);
  cuda::Stream stream = nullptr;
  cuda::check(driver.cuStreamCreate(&stream, kNonBlocking), "a stream cannot be made", device_->name);
  const std::shared_ptr<cuda::StreamState> held(stream, [&](cuda::Stream made) { driver.cuStreamDestroy_v2(made); });
  cuda::check(driver.cuStreamBeginCapture_v2(stream, kThisThreadOnly), "launches cannot be recorded", device_->name);
  cuda::Graph graph = nullptr;
  recording_stream = stream;
  try {
    work();
  } catch (...) {
    driver.cuStreamEndCapture(stream, &graph);
    if (graph != nullptr) driver.cuGraphDestroy(graph);
    throw;
  }
  cuda::check(driver.cuStreamEndCapture(stream, &graph), "launches cannot be recorded", device_->name);
  cuda::GraphExec made = nullptr;
  const cuda::Result result = driver.cuGraphInstantiateWithFlags(&made, graph, 0);
  driver.cuGraphDestroy(graph);
  cuda::check(result, "a graph of launches cannot be made", device_->name);
  return std::make_unique<CudaRecording>(device_, made);
}

void CudaQueue::enqueue(const Recording& recording) {
  const Current current(device_->context, device_->name);
  cuda::check(cuda::driver().cuGraphLaunch(static_cast<const CudaRecording&>(recording).graph, stream_),
              "a graph of launches", device_->name);
}

void CudaQueue::copy_async(const void* from, void* to, std::size_t bytes) {
  const Current current(device_->context, device_->name);
  cuda::check(cuda::driver().cuMemcpyAsync(reinterpret_cast<cuda::Pointer>(to), reinterpret_cast<cuda::Pointer>(from),
                                           bytes, stream_),
              "a copy", device_->name);
}

void CudaQueue::copy(const void* from, void* to, std::size_t bytes) {
  if (bytes == 0) return;
  copy_async(from, to, bytes);
  const Current current(device_->context, device_->name);
  cuda::check(cuda::driver().cuStreamSynchronize(stream_), "a copy", device_->name);
}

void CudaQueue::wait() {
  const Current current(device_->context, device_->name);
  cuda::check(cuda::driver().cuStreamSynchronize(stream_), "a kernel", device_->name);
}

std::shared_ptr<void> CudaQueue::allocate(std::size_t bytes, Placement placement) {
  const cuda::Driver& driver = cuda::driver();
  const Current current(device_->context, name());
  const std::size_t taken = std::max<std::size_t>(bytes, 1);
  void* data = nullptr;
  auto* const address = reinterpret_cast<cuda::Pointer*>(&data);
  if (placement == Placement::shared && !device_->shares_memory) placement = Placement::pinned;
  const cuda::Result result = placement == Placement::device   ? driver.cuMemAlloc_v2(address, taken)
                              : placement == Placement::shared ? driver.cuMemAllocManaged(address, taken, kAttachGlobal)
                                                               : driver.cuMemHostAlloc(&data, taken, kPortableAndMapped);
  if (result == kOutOfMemory && placement == Placement::pinned)
    throw DeviceError(gigabytes(bytes) + " of pinned host memory for " + name() +
                      " were requested, which the host refuses: see its free memory, and the limit of a container. "
                      "Lower the size of the replay, or end other programs.");
  if (result == kOutOfMemory) {
    std::size_t free = 0, total = 0;
    driver.cuMemGetInfo_v2(&free, &total);
    throw DeviceError(gigabytes(bytes) + (placement == Placement::shared ? " of shared" : " of") + " memory on " + name() +
                      " were requested; " + gigabytes(free) + " of " + gigabytes(total) +
                      " are free. Lower the size of the replay, place it on another device, or end other programs "
                      "that use this one.");
  }
  cuda::check(result, "memory cannot be allocated", name());
  const bool host = placement == Placement::pinned;
  std::shared_ptr<void> memory(data, [device = device_, host](void* held) {
    try {
      const Current current(device->context, device->name);
      // Both wait for kernels that still use the memory.
      if (host)
        cuda::driver().cuMemFreeHost(held);
      else
        cuda::driver().cuMemFree_v2(reinterpret_cast<cuda::Pointer>(held));
    } catch (const DeviceError&) {  // the memory of a device that is gone is gone too
    }
  });
  cuda::check(driver.cuMemsetD8Async(reinterpret_cast<cuda::Pointer>(data), 0, taken, stream_), "memory cannot be zeroed",
              name());
  cuda::check(driver.cuStreamSynchronize(stream_), "memory cannot be zeroed", name());
  return memory;
}

bool CudaQueue::reaches(const void* data) const {
  const Current current(device_->context, device_->name);
  const auto attribute = [&](int which) {
    int value = 0;
    const auto at = reinterpret_cast<cuda::Pointer>(data);
    return cuda::driver().cuPointerGetAttribute(&value, which, at) == 0 ? value : 0;
  };
  const int type = attribute(kMemoryType);
  if (type != kDeviceMemory || (attribute(kIsManaged) & 1) != 0) return type != 0;
  return attribute(kOrdinal) == device_->index;
}

}  // namespace pearl::device
