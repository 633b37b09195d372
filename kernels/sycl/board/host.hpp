// What host checks of generated programs have in common: a device, queues, memory that both sides see.
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

// The stages of the program, running; and a queue for each kernel that is launched again and again.
class Board {
 public:
  explicit Board(int stages) : device_(kSelector), context_(device_) {
    for (int i = 0; i < stages; ++i) stages_.push_back(queue());
    launch_stages(stages_);
  }

  sycl::queue queue() const { return {context_, device_, sycl::property::queue::in_order{}}; }

  // Host memory, zeroed. Kernels reach it without copies, on boards whose support package has USM host allocations.
  // Kernels take pointers as they come, also those in orders and contexts, so that their units for loads and stores
  // are connected to host and device memory alike; in device memory they would work too, with copies to and fro.
  template <class T>
  T* memory(std::size_t count) {
    T* found = sycl::malloc_host<T>(count, stages_.front());
    for (std::size_t i = 0; i < count; ++i) found[i] = T{};
    return found;
  }

  // Until all stages have ended, which something told them to.
  void join() {
    for (sycl::queue& stage : stages_) stage.wait();
  }

 private:
  sycl::device device_;
  sycl::context context_;
  std::vector<sycl::queue> stages_;
};

// Counts what is not as expected.
class Verdict {
 public:
  void require(bool as_expected, const char* what) {
    if (as_expected) return;
    if (wrong_++ < 10) std::cout << what << " not as expected\n";
  }
  // What main() returns.
  int say() const {
    std::cout << (wrong_ == 0 ? "all as expected\n" : "FAILED\n");
    return wrong_ != 0;
  }

 private:
  int wrong_ = 0;
};
