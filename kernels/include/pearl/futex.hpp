// Sleeps until a 32-bit word of (possibly shared) memory changes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#endif

namespace pearl {

using SharedWord = std::atomic<std::uint32_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == 4);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Returns when the word differs from `seen`, someone woke it, or `seconds` passed; may also return early.
inline void sleep_while_equal(SharedWord& word, std::uint32_t seen, double seconds) {
#if defined(__linux__)
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(seconds);
  timeout.tv_nsec = static_cast<long>((seconds - static_cast<double>(timeout.tv_sec)) * 1e9);
  // Not the private form: the waker may be another process.
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
#else
  if (word.load(std::memory_order_acquire) == seen)
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds < 50e-6 ? seconds : 50e-6));
#endif
}

inline void wake_all(SharedWord& word) {
#if defined(__linux__)
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Tells the processor that the caller is spinning.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A point in time `seconds` ahead; infinity does not overflow.
class Deadline {
 public:
  explicit Deadline(double seconds) : end_(now() + (seconds > 0.0 ? (seconds < 1e9 ? seconds : 1e9) : 0.0)) {}
  double left() const { return end_ - now(); }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  double end_;
};

// A change counter to sleep on. Ringing costs no system call while nobody sleeps.
struct Signal {
  SharedWord value;
  SharedWord sleepers;

  // Call after the change that sleepers wait for is visible.
  void ring() {
    value.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all(value);
  }

  // Waits until `ready()`; false on timeout. `ready` must read with acquire order.
  template <class Ready>
  bool wait(Ready ready, double timeout_s) {
    if (ready()) return true;
    if (timeout_s <= 0.0) return false;
    const Deadline deadline(timeout_s);
    // A sleeper killed while asleep leaves the count too high, which only costs a system call per ring.
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool done = false;
    for (;;) {
      const std::uint32_t seen = value.load(std::memory_order_seq_cst);
      done = ready();
      const double left = deadline.left();
      if (done || left <= 0.0) break;
      sleep_while_equal(value, seen, left < kSlice ? left : kSlice);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return done;
  }

 private:
  static constexpr double kSlice = 0.25;  // bounds the delay if a waker is killed between its change and its ring
};

}  // namespace pearl
