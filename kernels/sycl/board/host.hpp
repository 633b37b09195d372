// Shared by the host checks of generated programs: a device, queues, memory that host and device see.
//
// Include after the generated program, which brings the SYCL headers.
#pragma once

#include <cstddef>
#include <iostream>
#include <vector>

#ifdef PEARL_FPGA_HARDWARE
inline const auto kSelector = sycl::ext::intel::fpga_selector_v;
#else
inline const auto kSelector = sycl::ext::intel::fpga_emulator_selector_v;
#endif

// Runs the stages of the program, and creates queues for the kernels that are launched repeatedly.
class Board {
 public:
  explicit Board(int stages) : device_(kSelector), context_(device_) {
    for (int i = 0; i < stages; ++i) stages_.push_back(queue());
    launch_stages(stages_);
  }

  sycl::queue queue() const { return {context_, device_, sycl::property::queue::in_order{}}; }

  // Zeroed host memory. Kernels use it without copies, on boards whose support package has USM host allocations.
  // Kernels take plain pointers, also in orders and contexts, so their load and store units reach host and device
  // memory alike: device memory would work too, with copies.
  template <class T>
  T* memory(std::size_t count) {
    T* found = sycl::malloc_host<T>(count, stages_.front());
    for (std::size_t i = 0; i < count; ++i) found[i] = T{};
    return found;
  }

  // Waits until all stages, told to stop, have ended.
  void join() {
    for (sycl::queue& stage : stages_) stage.wait();
  }

 private:
  sycl::device device_;
  sycl::context context_;
  std::vector<sycl::queue> stages_;
};

// Counts unexpected results.
class Verdict {
 public:
  void require(bool as_expected, const char* what) {
    if (as_expected) return;
    if (wrong_++ < 10) std::cout << what << " not as expected\n";
  }
  // The return value of main().
  int say() const {
    std::cout << (wrong_ == 0 ? "all as expected\n" : "FAILED\n");
    return wrong_ != 0;
  }

 private:
  int wrong_ = 0;
};
