#include "pearl/learner/team.hpp"

#include <chrono>
#include <limits>

#include "pearl/learner/subnormals.hpp"
#include "pearl/learner/tiles.hpp"
#include "pearl/threads.hpp"

namespace pearl::learner {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

// Spins for as long as the others usually take, then sleeps.
template <class Ready>
void await(Signal& signal, Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  while (!signal.wait(ready, std::numeric_limits<double>::infinity())) {
  }
}

}  // namespace

Team::Team(std::size_t size) {
  check_threads("threads", size);
  try {
    start_threads(threads_, size - 1, [this](std::size_t thread) { serve(thread + 1); });
  } catch (...) {
    stop();  // destroying a joinable thread would end the process
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  stopping_.store(true, std::memory_order_release);
  job_.fetch_add(1, std::memory_order_release);
  started_.ring();
  for (std::thread& thread : threads_) thread.join();
}

void Team::start(Call call, void* object) {
  const SubnormalsAreZero flushed;
  call_ = call;
  object_ = object;
  if (threads_.empty()) return call_as(0);
  job_.fetch_add(1, std::memory_order_release);
  started_.ring();
  call_as(0);
  barrier();
}

void Team::call_as(std::size_t worker) {
  const KeptTiles tiles;
  call_(object_, worker);
}

void Team::serve(std::size_t worker) {
  const SubnormalsAreZero flushed;
  for (std::uint32_t seen = 0;; ++seen) {
    await(started_, [&] { return job_.load(std::memory_order_acquire) != seen; });
    if (stopping_.load(std::memory_order_acquire)) return;
    call_as(worker);
    barrier();
  }
}

void Team::barrier() {
  if (threads_.empty()) return;
  const std::uint32_t round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    passed_.ring();
    return;
  }
  await(passed_, [&] { return round_.load(std::memory_order_acquire) != round; });
}

}  // namespace pearl::learner
