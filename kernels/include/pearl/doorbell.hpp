// A change counter in shared memory: any process may ring it and wait on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pearl/futex.hpp"
#include "pearl/shared_memory.hpp"

namespace pearl {

class Doorbell {
  struct Layout {
    std::atomic<std::uint64_t> magic;
    Signal signal;
  };
  static constexpr std::uint64_t kMagic = 0x31'4C4C'4542'5250;  // "PRBELL1"

 public:
  static constexpr std::size_t nbytes() { return 64; }

  // The buffer is zeroed memory, or one that already holds a Doorbell.
  Doorbell(void* memory, std::size_t size)
      : layout_(static_cast<Layout*>(check_region("A Doorbell", memory, size, nbytes()))) {
    std::uint64_t found = 0;
    if (!layout_->magic.compare_exchange_strong(found, kMagic) && found != kMagic)
      throw QueueError("A Doorbell needs zeroed memory or an existing Doorbell; found mark " + std::to_string(found) + ".");
  }

  // Any process, any thread.
  std::uint32_t value() const { return layout_->signal.value.load(std::memory_order_acquire); }
  void ring() { layout_->signal.ring(); }
  // True if the value differs from `seen` within `timeout_s`.
  bool wait(std::uint32_t seen, double timeout_s) {
    return layout_->signal.wait([&] { return value() != seen; }, timeout_s);
  }

 private:
  Layout* layout_;
};

}  // namespace pearl
