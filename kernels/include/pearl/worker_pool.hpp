// Threads that share the chunks of a job with the calling thread (the paper's W workers of the Replay Manager).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "pearl/futex.hpp"
#include "pearl/threads.hpp"

namespace pearl {

// The caller is one of the workers and never waits for another to begin: a worker that is not scheduled takes no chunk.
// Threads start with the first job, or at start(). After a job they stay awake for `linger` in case another follows
// soon, then sleep.
class WorkerPool {
 public:
  explicit WorkerPool(unsigned workers, std::chrono::microseconds linger = {})
      : workers_(workers < 1 ? 1 : workers), linger_(linger) {
    check_threads("workers", workers_);
  }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  ~WorkerPool() {
    stopping_.store(true, std::memory_order_seq_cst);
    begun_.ring();
    for (auto& thread : threads_) thread.join();
  }

  unsigned workers() const { return workers_; }

  // Throws Error if the system has no thread left. After it succeeded, no job throws that.
  void start() {
    start_threads(threads_, workers_ - 1, [this](std::size_t) { serve(); });
  }

  // Calls work(chunk) once for each of `chunks` (below 2^32), in any order and on any worker; returns when all are done.
  // `work` must not throw. From any thread; while a job runs, the caller of another job runs that alone.
  template <class Work>
  void run(std::size_t chunks, const Work& work) {
    std::unique_lock lock(running_, std::defer_lock);
    if (workers_ == 1 || chunks < 2 || !lock.try_lock()) {
      for (std::size_t chunk = 0; chunk < chunks; ++chunk) work(chunk);
      return;
    }
    offer(chunks, work);
    finish();
  }

  // The two parts of run(), for a caller with other work in between. In finish() the caller runs the chunks that no
  // other worker has taken. `work` must live until then, and no other job may run in between.
  template <class Work>
  void offer(std::size_t chunks, const Work& work) {
    start();
    work_.store(&work, std::memory_order_relaxed);
    call_.store([](const void* job, std::size_t chunk) { (*static_cast<const Work*>(job))(chunk); },
                std::memory_order_relaxed);
    pending_.store(chunks, std::memory_order_relaxed);
    const std::uint64_t job = (claims_.load(std::memory_order_relaxed) >> 32) + 1;
    claims_.store(job << 32 | chunks, std::memory_order_seq_cst);
    begun_.ring();
  }
  void finish() {
    take_chunks();
    const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    for (int turn = 0; turn < kSpins && !done(); ++turn) relax();
    while (!done()) done_.wait(done, std::numeric_limits<double>::infinity());
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kSpins = 2000;  // tens of microseconds, about one chunk

  void serve() {
    std::uint32_t seen = 0;
    while (!stopping_.load(std::memory_order_seq_cst)) {
      take_chunks();
      const auto begun = [&] { return begun_.value.load(std::memory_order_seq_cst) != seen; };
      // Yields instead of spinning: others, such as the caller, may need the core.
      for (const auto end = Clock::now() + linger_; !begun() && Clock::now() < end;) std::this_thread::yield();
      begun_.wait(begun, std::numeric_limits<double>::infinity());
      seen = begun_.value.load(std::memory_order_seq_cst);
    }
  }

  void take_chunks() {
    std::uint64_t claims = claims_.load(std::memory_order_seq_cst);
    while ((claims & kChunks) != 0) {
      // The job cannot end while a worker holds one of its chunks, so its pointers are valid.
      if (!claims_.compare_exchange_weak(claims, claims - 1, std::memory_order_acq_rel)) continue;
      const auto call = call_.load(std::memory_order_relaxed);
      call(work_.load(std::memory_order_relaxed), static_cast<std::size_t>((claims & kChunks) - 1));
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.ring();
      claims = claims_.load(std::memory_order_acquire);
    }
  }

  static constexpr std::uint64_t kChunks = 0xFFFFFFFF;

  const unsigned workers_;
  const std::chrono::microseconds linger_;
  std::mutex running_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_ = false;
  std::atomic<std::uint64_t> claims_ = 0;  // upper half: a job's number; lower half: its chunks not yet taken
  std::atomic<std::size_t> pending_ = 0;   // chunks not done
  std::atomic<const void*> work_ = nullptr;
  std::atomic<void (*)(const void*, std::size_t)> call_ = nullptr;
  Signal begun_{};
  Signal done_{};
};

// Decides whether sharing one kind of work among workers is faster, by timing both ways. It tries the slower way rarely,
// so that workers without a free core cost next to nothing. One caller at a time.
class SharingTrial {
 public:
  bool begin() {
    ++call_;
    const bool better = ns_per_item_[1] <= ns_per_item_[0];
    shared_ = call_ % kEvery < 2 ? call_ % kEvery == 1 : better;
    start_ = Clock::now();
    return shared_;
  }

  void end(std::size_t items) {
    const std::chrono::duration<double, std::nano> took = Clock::now() - start_;
    double& mean = ns_per_item_[shared_];
    const double now = took.count() / static_cast<double>(items);
    mean = mean == 0.0 ? now : mean + kWeight * (now - mean);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr unsigned kEvery = 64;
  static constexpr double kWeight = 0.2;

  unsigned call_ = ~0u;
  bool shared_ = false;
  double ns_per_item_[2] = {0.0, 0.0};
  Clock::time_point start_{};
};

}  // namespace pearl
