// A SYCL device's queue. Host code: compiled by any C++20 compiler against the headers of the SYCL runtime.
#pragma once

#include <cstddef>
#include <memory>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include <sycl/sycl.hpp>

#include "pearl/device/queue.hpp"

namespace pearl::device {

class SyclKernel final : public Kernel {
 public:
  explicit SyclKernel(sycl::kernel made) : kernel(std::move(made)) {}
  const sycl::kernel kernel;
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

class SyclQueue final : public DeviceQueue {
 public:
  explicit SyclQueue(sycl::queue queue, std::size_t kernels_at_once = 0);

  const sycl::queue& sycl() const { return queue_; }
  // Kernels that the device runs at once for a process; 0: no limit is known.
  std::size_t kernels_at_once() const { return kernels_at_once_; }
  std::string name() const override;

  // Compiles kernels/sycl/<stem>.sycl.cpp.
  std::shared_ptr<const Kernels> compile(const std::string& stem, const std::vector<std::string>& kernels,
                                         const std::vector<std::string>& options = {}) override;
  // The same for any text; `source` names it in errors.
  std::shared_ptr<const Kernels> compile_text(const std::string& source, const std::string& text,
                                              const std::vector<std::string>& kernels,
                                              const std::vector<std::string>& options = {});
  // The same without the cache, as each program gets its own pipes; not optimized if PEARL_FPGA_OPTIMIZE is 0.
  std::shared_ptr<const Kernels> compile_own(const std::string& source, const std::string& text,
                                             const std::vector<std::string>& kernels);
  // Another queue of the same device. Both share memory and kernels.
  std::unique_ptr<SyclQueue> sibling() const;

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
  void copy_async(const void* from, void* to, std::size_t bytes) override;
  void copy(const void* from, void* to, std::size_t bytes) override;
  void wait() override;
  std::shared_ptr<void> allocate(std::size_t bytes, Placement placement) override;
  bool reaches(const void* data) const override;

 private:
  void enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments, std::size_t count) override;
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
  std::size_t kernels_at_once_;
};

}  // namespace pearl::device
