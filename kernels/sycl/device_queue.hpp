// One device and its in-order queue: memory, kernels compiled from source, launches, and how many there were.
//
// Host code: compiled by any C++20 compiler against the headers of the SYCL runtime.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sycl/sycl.hpp>

#include "pearl/errors.hpp"

namespace pearl::device {

// The kernels of one source, compiled for one device.
class Kernels {
 public:
  explicit Kernels(std::vector<std::pair<std::string, sycl::kernel>> kernels) : kernels_(std::move(kernels)) {}
  const sycl::kernel& operator[](std::string_view name) const;

 private:
  std::vector<std::pair<std::string, sycl::kernel>> kernels_;
};

// A shared lock for waiting on an FPGA. Pipelines lock the mutex exclusively while their stages start (autorun.hpp):
// the emulator may run a stage, which never ends, on a thread that waits.
class WaitingForFpga {
 public:
  explicit WaitingForFpga(const sycl::device& device);

  static std::shared_mutex& mutex();

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

class DeviceQueue {
 public:
  explicit DeviceQueue(sycl::queue queue);

  const sycl::queue& sycl() const { return queue_; }
  std::string name() const;
  bool is_cpu() const { return cpu_; }

  // Compiles kernels/sycl/<source>.sycl.cpp, which this library embeds; cached for each device. Throws DeviceError with
  // the compiler's log, or with the name of a kernel that the device cannot run.
  std::shared_ptr<const Kernels> compile(const std::string& source, const std::vector<std::string>& kernels,
                                         const std::vector<std::string>& options = {});
  // The same for any text; `source` names it in errors.
  std::shared_ptr<const Kernels> compile_text(const std::string& source, const std::string& text,
                                              const std::vector<std::string>& kernels,
                                              const std::vector<std::string>& options = {});
  // The same without the cache: each program gets its own pipes.
  std::shared_ptr<const Kernels> compile_own(const std::string& source, const std::string& text,
                                             const std::vector<std::string>& kernels);
  // Another queue of the same device. Both share memory and kernels.
  std::unique_ptr<DeviceQueue> sibling() const;

  // Launches `groups` work-groups of `lanes` items; in launch_rows, of rows x lanes items.
  template <class... Arguments>
  void launch(const sycl::kernel& kernel, std::size_t groups, std::size_t lanes, Arguments... arguments) {
    launch_rows(kernel, groups, 1, lanes, arguments...);
  }
  template <class... Arguments>
  void launch_rows(const sycl::kernel& kernel, std::size_t groups, std::size_t rows, std::size_t lanes,
                   Arguments... arguments) {
    ++launches_;
    guard([&] {
      queue_.submit([&](sycl::handler& handler) {
        handler.set_args(arguments...);
        handler.parallel_for(sycl::nd_range<2>({rows, groups * lanes}, {rows, lanes}), kernel);
      });
    });
  }
  // Launches a single task. Kernels joined by pipes need a queue each: one queue runs its kernels in order.
  template <class... Arguments>
  sycl::event launch_task(const sycl::kernel& kernel, Arguments... arguments) {
    ++launches_;
    sycl::event event;
    guard([&] {
      event = queue_.submit([&](sycl::handler& handler) {
        handler.set_args(arguments...);
        handler.single_task(kernel);
      });
    });
    return event;
  }
  // Copies between any memories, after all launched kernels, and waits.
  void copy(const void* from, void* to, std::size_t bytes);
  // The lanes of a single work-group that handles `count` items.
  std::size_t lanes(std::size_t count) const;
  // The most work-groups that speed up independent work.
  std::size_t most_groups() const { return most_groups_; }
  // Waits for all launched kernels. Throws DeviceError where one failed.
  void wait();
  std::uint64_t launches() const { return launches_; }

 private:
  template <class Work>
  void guard(Work work) {
    try {
      work();
    } catch (const sycl::exception& error) {
      rethrow(error);
    }
  }
  [[noreturn]] void rethrow(const sycl::exception& error) const;

  sycl::queue queue_;
  bool cpu_;
  std::size_t most_lanes_;
  std::size_t most_groups_;
  std::atomic<std::uint64_t> launches_ = 0;
};

// Where memory lies: on the `device` alone, `shared` with the host (unified shared memory, which moves to the side that
// touches it), or `pinned` on the host.
enum class Placement { device, shared, pinned };

// Bytes of `count` items; on overflow, more than any device has.
inline std::size_t bytes_of(std::size_t count, std::size_t item_bytes) {
  return item_bytes != 0 && count > SIZE_MAX / item_bytes ? SIZE_MAX : count * item_bytes;
}

// Zeroed memory that kernels of one device read and write. Throws DeviceError where the device lacks this kind
// of memory, has too little of it, or cannot allocate that much in one piece.
std::shared_ptr<void> allocate(DeviceQueue& queue, std::size_t bytes, Placement placement);

// `count` zeroed items in memory of allocate().
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(DeviceQueue& queue, std::size_t count, Placement placement)
      : memory_(allocate(queue, bytes_of(count, sizeof(T)), placement)), count_(count) {}
  DeviceArray(DeviceArray&&) noexcept = default;
  DeviceArray& operator=(DeviceArray&&) noexcept = default;

  T* data() const { return static_cast<T*>(memory_.get()); }
  std::size_t size() const { return count_; }
  // Only for memory that the host can reach.
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  std::shared_ptr<void> memory_;
  std::size_t count_ = 0;
};

}  // namespace pearl::device
