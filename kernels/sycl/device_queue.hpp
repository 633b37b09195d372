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
#include <vector>

#include <sycl/sycl.hpp>

#include "pearl/errors.hpp"

namespace pearl::device {

// A kernel of a source, and what a device must have to run it.
struct KernelNeeds {
  const char* name;
  std::vector<sycl::aspect> aspects;
};

// The kernels of one source, compiled for one device.
class Kernels {
 public:
  Kernels(std::vector<std::string> names, std::vector<sycl::kernel> kernels);
  const sycl::kernel& operator[](const char* name) const;

 private:
  std::vector<std::string> names_;
  std::vector<sycl::kernel> kernels_;
};

// Held shared by whoever waits for an FPGA, and alone while stages of a pipeline start there (autorun.hpp): on the
// emulator a thread that waits may be given a stage to run, which never ends.
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

  // Compiles kernels/sycl/<source>.sycl.cpp, which is part of this library, unless it was for this device before.
  // Throws DeviceError with the compiler's log, or naming the kernel that the device cannot run and what it lacks.
  std::shared_ptr<const Kernels> compile(const std::string& source, const std::vector<KernelNeeds>& kernels,
                                         const std::vector<std::string>& options = {});
  // The same for any text; `source` names it in errors.
  std::shared_ptr<const Kernels> compile_text(const std::string& source, const std::string& text,
                                              const std::vector<KernelNeeds>& kernels,
                                              const std::vector<std::string>& options = {});
  // The same, but never shared: a program whose pipes are its own.
  std::shared_ptr<const Kernels> compile_own(const std::string& source, const std::string& text,
                                             const std::vector<KernelNeeds>& kernels);
  // Another queue of the same device, that shares its memory and kernels.
  std::unique_ptr<DeviceQueue> sibling() const;

  // `groups` work-groups of `lanes` items; a second dimension, `rows`, makes groups of rows x lanes.
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
  // One single task. Kernels that are joined by pipes need queues of their own: on one they follow one another.
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
  // Copies between any memories, after what was launched, and waits.
  void copy(const void* from, void* to, std::size_t bytes);
  // How many lanes a single work-group has for `count` items.
  std::size_t lanes(std::size_t count) const;
  // How many work-groups are worth launching for independent work.
  std::size_t most_groups() const { return most_groups_; }
  // Until all that was launched is done. Throws DeviceError for what went wrong on the device.
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

// `count` items of zeroed memory that kernels of one device read and write; `shared` with the host (unified shared
// memory that moves to whoever touches it), `pinned` on the host, or on the `device` alone.
enum class Placement { device, shared, pinned };

// Bytes of `count` items; where that overflows, more than any device has.
inline std::size_t bytes_of(std::size_t count, std::size_t item_bytes) {
  return item_bytes != 0 && count > SIZE_MAX / item_bytes ? SIZE_MAX : count * item_bytes;
}

class RawMemory {
 public:
  RawMemory() = default;
  // Throws DeviceError where that is more than the device has or takes in one piece.
  RawMemory(DeviceQueue& queue, std::size_t bytes, Placement placement);
  RawMemory(RawMemory&& other) noexcept;
  RawMemory& operator=(RawMemory&& other) noexcept;
  ~RawMemory();

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<sycl::queue> queue_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(DeviceQueue& queue, std::size_t count, Placement placement)
      : memory_(queue, bytes_of(count, sizeof(T)), placement), count_(count) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return count_; }
  // For memory that the host may touch.
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  RawMemory memory_;
  std::size_t count_ = 0;
};

}  // namespace pearl::device
