// A few threads that work on one step together, and sleep between steps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "pearl/futex.hpp"

namespace pearl::learner {

// The division of a batch among a team: whole vectors of transitions per worker; the last workers may get none.
struct Shares {
  Shares(std::size_t rows, std::size_t workers, std::size_t lanes)
      : rows(rows), each((rows + workers * lanes - 1) / (workers * lanes) * lanes), used((rows + each - 1) / each) {}
  std::size_t begin(std::size_t worker) const { return std::min(rows, worker * each); }
  std::size_t end(std::size_t worker) const { return begin(worker + 1); }

  std::size_t rows, each, used;  // used: workers that get any
};

class Team {
 public:
  // The caller of run() is worker 0; starts `size` - 1 threads. Throws Error if the system has fewer left.
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
  // Every worker calls it inside work: returns when all have, and makes their writes visible to each other.
  void barrier();

 private:
  using Call = void (*)(void* object, std::size_t worker);
  void start(Call call, void* object);
  void call_as(std::size_t worker);
  void serve(std::size_t worker);
  void stop();

  Call call_ = nullptr;
  void* object_ = nullptr;
  std::atomic<std::uint32_t> job_{0};
  std::atomic<std::uint32_t> arrived_{0}, round_{0};
  std::atomic<bool> stopping_{false};
  Signal started_{}, passed_{};
  std::vector<std::thread> threads_;
};

}  // namespace pearl::learner
