// Bounded single-producer single-consumer ring of fixed-size slots in shared memory.
//
// Only `tail` (written by the producer side) and `head` (written by the consumer side) move, each by one, after their slot
// is complete. A process killed at any point loses at most the slot that it had not yet published or released; its
// successor continues from there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/doorbell.hpp"
#include "pearl/futex.hpp"
#include "pearl/shared_memory.hpp"

namespace pearl {

class SlotQueue {
  struct alignas(kCacheLine) Layout {
    SharedHeader header;  // shape: slots, slot_bytes, 0
    SharedWord closed;
    alignas(kCacheLine) std::atomic<std::uint64_t> tail;  // slots published since creation
    Signal published;
    alignas(kCacheLine) std::atomic<std::uint64_t> head;  // slots released since creation
    Signal released;
  };
  static constexpr std::uint64_t kMagic = 0x3145'5545'5551'5250;  // "PRQUEUE1"

 public:
  static std::size_t nbytes(std::size_t slots, std::size_t slot_bytes) {
    shared_bytes("A SlotQueue", slots, slot_bytes);
    return payload_offset(slots) + slots * stride(slot_bytes);
  }

  // `create` initialises the queue; otherwise it must exist with the same shape.
  SlotQueue(void* memory, std::size_t size, std::size_t slots, std::size_t slot_bytes, bool create)
      : slots_(slots), stride_(stride(slot_bytes)) {
    if (slots < 1 || slot_bytes < 1) throw QueueError("A SlotQueue needs at least one slot of at least one byte.");
    layout_ = static_cast<Layout*>(check_region("A SlotQueue", memory, size, nbytes(slots, slot_bytes)));
    counts_ = reinterpret_cast<std::uint64_t*>(layout_ + 1);
    const std::uint64_t shape[3] = {slots, slot_bytes, 0};
    if (!create) {
      check_header("A SlotQueue", layout_->header, kMagic, shape);
      return;
    }
    layout_->header.magic.store(0, std::memory_order_relaxed);
    for (int i = 0; i < 3; ++i) layout_->header.shape[i] = shape[i];
    layout_->closed.store(0, std::memory_order_relaxed);
    layout_->tail.store(0, std::memory_order_relaxed);
    layout_->head.store(0, std::memory_order_relaxed);
    for (Signal* signal : {&layout_->published, &layout_->released}) {
      signal->value.store(0, std::memory_order_relaxed);
      signal->sleepers.store(0, std::memory_order_relaxed);
    }
    for (std::size_t i = 0; i < slots; ++i) counts_[i] = 0;
    layout_->header.magic.store(kMagic, std::memory_order_release);
  }

  // Byte offset of a slot's payload in the buffer, a multiple of 64. Either side.
  std::size_t offset(std::size_t slot) const {
    check_slot(slot);
    return payload_offset(slots_) + slot * stride_;
  }
  std::size_t slots() const { return slots_; }
  // Bytes of a slot's payload, rounded up to cache lines.
  std::size_t room() const { return stride_; }

  // Called from the producer side only. The slot to fill next, -1 on timeout; the same slot until it is published.
  std::int64_t reserve(double timeout_s) {
    const auto ready = [&] { return closed() || size() < slots_; };
    const bool done = layout_->released.wait(ready, timeout_s);
    if (closed()) throw QueueClosedError("The queue is closed: nothing more can be put in.");
    return done ? static_cast<std::int64_t>(layout_->tail.load(std::memory_order_relaxed) % slots_) : -1;
  }

  // Called from the producer side only: publishes the reserved slot with a number of the producer's (usually its rows).
  void publish(std::uint64_t count) {
    const std::uint64_t tail = layout_->tail.load(std::memory_order_relaxed);
    if (tail - layout_->head.load(std::memory_order_acquire) >= slots_)
      throw QueueError("publish() without a reserved slot: the queue is full.");
    counts_[tail % slots_] = count;
    layout_->tail.store(tail + 1, std::memory_order_release);
    layout_->published.ring();
    if (bell_ != nullptr) bell_->ring();
  }

  // Called from the consumer side only. The oldest published slot, -1 on timeout; the same slot until it is released.
  std::int64_t peek(double timeout_s) {
    const auto ready = [&] { return size() > 0 || closed(); };
    layout_->published.wait(ready, timeout_s);
    const bool was_closed = closed();  // read before size(): a slot published before closing is still delivered
    if (size() > 0) return static_cast<std::int64_t>(layout_->head.load(std::memory_order_relaxed) % slots_);
    if (was_closed) throw QueueClosedError("The queue is closed and empty: nothing more will come.");
    return -1;
  }

  // Called from the consumer side only: the number given to publish().
  std::uint64_t count(std::size_t slot) const {
    check_slot(slot);
    return counts_[slot];
  }

  // Called from the consumer side only: returns the slot last peeked to the producer.
  void release() {
    const std::uint64_t head = layout_->head.load(std::memory_order_relaxed);
    if (layout_->tail.load(std::memory_order_acquire) == head)
      throw QueueError("release() without a peeked slot: the queue is empty.");
    layout_->head.store(head + 1, std::memory_order_release);
    layout_->released.ring();
  }

  // Either side, any thread; wakes both.
  void close() {
    layout_->closed.store(1, std::memory_order_release);
    layout_->published.ring();
    layout_->released.ring();
    if (bell_ != nullptr) bell_->ring();
  }
  bool closed() const { return layout_->closed.load(std::memory_order_acquire) != 0; }

  // Slots published and not yet released. Either side.
  std::size_t size() const {
    const std::uint64_t head = layout_->head.load(std::memory_order_acquire);
    return static_cast<std::size_t>(layout_->tail.load(std::memory_order_acquire) - head);
  }

  // Called from the consumer side only. Waits until each of `queues`, whose producers ring `bell`, has a message or is
  // closed; false on timeout.
  static bool wait_for_all(const std::vector<const SlotQueue*>& queues, Doorbell& bell, double timeout_s) {
    const Deadline deadline(timeout_s);
    for (;;) {
      const std::uint32_t seen = bell.value();
      if (std::all_of(queues.begin(), queues.end(), [](auto* queue) { return queue->size() > 0 || queue->closed(); }))
        return true;
      if (deadline.left() <= 0.0) return false;
      bell.wait(seen, deadline.left());
    }
  }

  // This side's publish() and close() ring the bell. Call before the queue is used.
  void attach_bell(Doorbell* bell) { bell_ = bell; }

 private:
  static std::size_t stride(std::size_t slot_bytes) { return round_up(slot_bytes, kCacheLine); }
  static std::size_t payload_offset(std::size_t slots) {
    return sizeof(Layout) + round_up(slots * sizeof(std::uint64_t), kCacheLine);
  }
  void check_slot(std::size_t slot) const {
    if (slot >= slots_)
      throw QueueError("Slot must lie in [0, " + std::to_string(slots_) + "); found " + std::to_string(slot) + ".");
  }

  std::size_t slots_;
  std::size_t stride_;
  Layout* layout_ = nullptr;
  std::uint64_t* counts_ = nullptr;
  Doorbell* bell_ = nullptr;
};

}  // namespace pearl
