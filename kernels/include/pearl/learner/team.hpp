// A few threads that work on one step together, and sleep between steps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "pearl/futex.hpp"

namespace pearl::learner {

class Team {
 public:
  // The caller of run() is worker 0; `size` - 1 threads are started.
  explicit Team(std::size_t size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::size_t size() const { return threads_.size() + 1; }

  // Calls work(worker) for every worker and returns when all have returned; `work` must not throw. One caller at a time.
  template <class Work>
  void run(Work& work) {
    start([](void* object, std::size_t worker) { (*static_cast<Work*>(object))(worker); }, &work);
  }
  // Called by every worker, from inside work: returns when all have called it, and shows each what the others wrote.
  void barrier();

 private:
  using Call = void (*)(void* object, std::size_t worker);
  void start(Call call, void* object);
  void serve(std::size_t worker);

  Call call_ = nullptr;
  void* object_ = nullptr;
  std::atomic<std::uint32_t> job_{0};
  std::atomic<std::uint32_t> arrived_{0}, round_{0};
  std::atomic<bool> stopping_{false};
  Signal started_{}, passed_{};
  std::vector<std::thread> threads_;
};

}  // namespace pearl::learner
