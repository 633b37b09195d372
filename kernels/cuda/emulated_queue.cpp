#include "emulated_queue.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace pearl::device {
namespace {

class EmulatedKernel final : public Kernel {
 public:
  explicit EmulatedKernel(emulator::Call call) : call(call) {}
  const emulator::Call call;
};

// Launches with copies of their arguments, as a CUDA graph has them.
struct EmulatedRecording final : Recording {
  struct Launch {
    const Kernel* kernel;
    LaunchShape shape;
    std::vector<Argument> arguments;
  };
  std::vector<Launch> launches;
};

// The recording that takes this thread's launches, if any.
thread_local EmulatedRecording* recording = nullptr;

}  // namespace

std::shared_ptr<const Kernels> EmulatedQueue::compile(const std::string& stem, const std::vector<std::string>& kernels,
                                                      const std::vector<std::string>& options) {
  std::string wanted;
  for (const std::string& option : options) wanted += (wanted.empty() ? "" : " ") + option;
  Kernels::Named found;
  for (const std::string& name : kernels) {
    const auto& all = emulator::compiled_kernels();
    const auto kernel = std::find_if(all.begin(), all.end(), [&](const emulator::CompiledKernel& candidate) {
      return candidate.stem == stem && candidate.options == wanted && candidate.name == name;
    });
    if (kernel == all.end())
      throw DeviceError("The emulator has no kernel " + name + " of " + stem + ".cu compiled with '" + wanted + "'.");
    found.emplace_back(name, std::make_unique<EmulatedKernel>(kernel->call));
  }
  return std::make_shared<const Kernels>(std::move(found));
}

void EmulatedQueue::enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments,
                            std::size_t count) {
  if (recording_here) {
    recording->launches.push_back({&kernel, shape, std::vector<Argument>(arguments, arguments + count)});
    return;
  }
  const emulator::Call call = static_cast<const EmulatedKernel&>(kernel).call;
  call(emulator::Wanted::check, arguments, count);
  add([this, call, shape, held = std::vector<Argument>(arguments, arguments + count), seed = seed_ + launches()] {
    emulator::run(call, shape, held.data(), held.size(), order_, seed);
  });
}

void EmulatedQueue::add(std::function<void()> work) {
  const std::lock_guard lock(running_);
  pending_.push_back(std::move(work));
  if (order_ == emulator::Order::ascending) run_pending();
}

// Under the lock.
void EmulatedQueue::run_pending() {
  const std::vector<std::function<void()>> due = std::exchange(pending_, {});
  for (const std::function<void()>& work : due) work();
}

std::unique_ptr<const Recording> EmulatedQueue::recorded(const std::function<void()>& work) {
  auto made = std::make_unique<EmulatedRecording>();
  recording = made.get();
  work();
  return made;
}

void EmulatedQueue::enqueue(const Recording& made) {
  for (const auto& [kernel, shape, arguments] : static_cast<const EmulatedRecording&>(made).launches)
    enqueue(*kernel, shape, arguments.data(), arguments.size());
}

void EmulatedQueue::wait() {
  refuse_while_recording();
  const std::lock_guard lock(running_);
  run_pending();
}

// Refuses calls that a GPU does not record.
void EmulatedQueue::refuse_while_recording() const {
  if (recording_here) throw DeviceError("Only launches can be recorded.");
}

void EmulatedQueue::copy_async(const void* from, void* to, std::size_t bytes) {
  refuse_while_recording();
  add([from, to, bytes] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}

void EmulatedQueue::copy(const void* from, void* to, std::size_t bytes) {
  copy_async(from, to, bytes);
  wait();
}

std::shared_ptr<void> EmulatedQueue::allocate(std::size_t bytes, Placement) {
  refuse_while_recording();
  constexpr std::size_t kAlignment = 256;  // as cuMemAlloc's
  if (bytes > SIZE_MAX - kAlignment) throw DeviceError(gigabytes(bytes) + " of memory on " + name() + " were requested.");
  const std::size_t taken = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  auto* const data = static_cast<char*>(std::aligned_alloc(kAlignment, taken));
  if (data == nullptr) throw DeviceError(gigabytes(bytes) + " of memory on " + name() + " were requested; less is free.");
  std::memset(data, 0, taken);
  const std::lock_guard lock(memory_->mutex);
  memory_->pieces.emplace_back(data, taken);
  return {data, [memory = memory_](void* held) {
            const std::lock_guard lock(memory->mutex);
            std::erase_if(memory->pieces, [&](const auto& piece) { return piece.first == held; });
            std::free(held);
          }};
}

bool EmulatedQueue::reaches(const void* data) const {
  const std::lock_guard lock(memory_->mutex);
  return std::any_of(memory_->pieces.begin(), memory_->pieces.end(), [&](const auto& piece) {
    return !std::less<>()(static_cast<const char*>(data), piece.first) &&
           std::less<>()(static_cast<const char*>(data), piece.first + piece.second);
  });
}

}  // namespace pearl::device
