// A versioned payload (weights) in shared memory: one writer, any number of readers, none ever waits for another.
//
// Two halves alternate: a reader of the newest version must retry only if the writer laps it. Each half has a sequence
// number, odd while it is written. Payload words are stored with release and loaded with acquire order, which keeps them
// between the two reads of the sequence number and costs nothing on x86.
//
// A payload may also announce changes of ordinary memory (a Data Storage's cursor, before and after an insertion).
// Whoever sees what the writer did after write() also sees the payload, and a reader's reads before read() happen before
// it reads the payload. Two fences ensure this; on x86 they cost no instruction, on ARM64 one each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pearl/aligned.hpp"
#include "pearl/shared_memory.hpp"

namespace pearl {

class Snapshot {
  using Word = std::atomic<std::uint64_t>;
  struct alignas(kCacheLine) Layout {
    SharedHeader header;  // shape: payload_bytes, 0, 0
    alignas(kCacheLine) std::atomic<std::uint64_t> version;
    std::atomic<std::uint64_t> sequence[2];
  };
  static constexpr std::uint64_t kMagic = 0x3154'4F48'5353'5250;  // "PRSSHOT1"

 public:
  static std::size_t nbytes(std::size_t payload_bytes) {
    return sizeof(Layout) + 2 * half_bytes(shared_bytes("A Snapshot", 1, payload_bytes));
  }

  Snapshot(void* memory, std::size_t size, std::size_t payload_bytes, bool create) : payload_bytes_(payload_bytes) {
    layout_ = static_cast<Layout*>(check_region("A Snapshot", memory, size, nbytes(payload_bytes)));
    const std::uint64_t shape[3] = {payload_bytes, 0, 0};
    if (!create) {
      check_header("A Snapshot", layout_->header, kMagic, shape);
      return;
    }
    layout_->header.magic.store(0, std::memory_order_relaxed);
    for (int i = 0; i < 3; ++i) layout_->header.shape[i] = shape[i];
    layout_->version.store(0, std::memory_order_relaxed);
    for (auto& sequence : layout_->sequence) sequence.store(0, std::memory_order_relaxed);
    layout_->header.magic.store(kMagic, std::memory_order_release);
  }

  std::size_t payload_bytes() const { return payload_bytes_; }
  // 0 before the first write. Any process, any thread.
  std::uint64_t version() const { return layout_->version.load(std::memory_order_acquire); }

  // Called by the one writer only. If it is killed here, the previous version stays valid.
  std::uint64_t write(const void* payload) {
    const std::uint64_t version = begin_write();
    put(version, 0, payload, payload_bytes_);
    end_write(version);
    return version;
  }

  // The same in pieces, each of which begins at a multiple of 8 bytes; together they are the whole payload. Called by
  // the one writer only.
  std::uint64_t begin_write() {
    const std::uint64_t version = layout_->version.load(std::memory_order_relaxed) + 1;
    layout_->sequence[version & 1].store(2 * version - 1, std::memory_order_relaxed);
    return version;
  }
  void put(std::uint64_t version, std::size_t begin, const void* piece, std::size_t count) {
    Word* words = half(version) + begin / 8;
    const char* bytes = static_cast<const char*>(piece);
    std::size_t at = 0;
    for (; at + 8 <= count; at += 8) {
      std::uint64_t word;
      std::memcpy(&word, bytes + at, 8);
      words[at / 8].store(word, std::memory_order_release);
    }
    if (at < count) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + at, count - at);
      words[at / 8].store(word, std::memory_order_release);
    }
  }
  void end_write(std::uint64_t version) {
    layout_->sequence[version & 1].store(2 * version, std::memory_order_release);
    layout_->version.store(version, std::memory_order_release);
    // Later plain stores may overtake a release store (ARM64: STLR, STR); the fence (DMB) prevents it.
    std::atomic_thread_fence(std::memory_order_release);
  }

  // Copies the newest payload out and returns its version; copies nothing and returns `seen_version` if that is the
  // newest. Any process, any thread. Throws QueueError if the Snapshot is damaged, as one in a file may be.
  std::uint64_t read(void* payload, std::uint64_t seen_version) const {
    // An acquire load may overtake earlier plain loads (ARM64: LDR, LDAR); the fence (DMB) prevents it.
    std::atomic_thread_fence(std::memory_order_acquire);
    std::uint64_t last = 0;
    for (int unchanged = 0;;) {
      const std::uint64_t version = layout_->version.load(std::memory_order_acquire);
      if (version == seen_version || version == 0) return seen_version;
      const std::atomic<std::uint64_t>& sequence = layout_->sequence[version & 1];
      if (sequence.load(std::memory_order_acquire) != 2 * version) {  // lapped: a newer version is complete
        unchanged = version == last ? unchanged + 1 : 0;
        last = version;
        if (unchanged > kMostLooks) throw QueueError("A Snapshot is damaged: its newest version is incomplete.");
        continue;
      }
      const Word* words = half(version);
      char* bytes = static_cast<char*>(payload);
      std::size_t at = 0;
      for (; at + 8 <= payload_bytes_; at += 8) {
        const std::uint64_t word = words[at / 8].load(std::memory_order_acquire);
        std::memcpy(bytes + at, &word, 8);
      }
      if (at < payload_bytes_) {
        const std::uint64_t word = words[at / 8].load(std::memory_order_acquire);
        std::memcpy(bytes + at, &word, payload_bytes_ - at);
      }
      if (sequence.load(std::memory_order_relaxed) == 2 * version) return version;
    }
  }

  // For readers that take a payload where it lies: byte offset in the buffer of `version`, which lies there whole if
  // holds(version) is true after reading. It is overwritten by the version after the next. Any process, any thread.
  std::size_t offset(std::uint64_t version) const {
    return sizeof(Layout) + (version & 1) * half_bytes(payload_bytes_);
  }
  bool holds(std::uint64_t version) const {
    // Later loads may not overtake those of the payload (ARM64: LDR, LDR); the fence (DMB) prevents it.
    std::atomic_thread_fence(std::memory_order_acquire);
    return layout_->sequence[version & 1].load(std::memory_order_relaxed) == 2 * version;
  }

 private:
  // The version advances before its half is written again: so many failed reads of one version mean damage, not lapping.
  static constexpr int kMostLooks = 1 << 22;

  static std::size_t half_bytes(std::size_t payload_bytes) { return round_up(payload_bytes, kCacheLine); }
  Word* half(std::uint64_t version) const {
    return reinterpret_cast<Word*>(reinterpret_cast<char*>(layout_) + offset(version));
  }

  std::size_t payload_bytes_;
  Layout* layout_ = nullptr;
};

}  // namespace pearl
