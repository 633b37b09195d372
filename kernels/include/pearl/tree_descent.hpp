// The descent of a K-ary sum tree, common to all variants of the kernels. Only kernels/cpu/replay_kernels*.cpp include
// it. Everything is local to the including file: code for one instruction set must not be linked into another.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "pearl/replay_kernels.hpp"

namespace pearl {
namespace {

constexpr std::size_t kScanned = std::size_t{1} << 30;     // priorities that a 32-bit count holds
constexpr std::size_t kDescentGroup = 64;  // queries descending together: as many cache misses in flight

// Prefetches the start of a family of K siblings; the hardware prefetcher gets the rest.
template <unsigned K, class T>
[[gnu::always_inline]] inline void prefetch_family(const T* family) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t nbytes = K * sizeof(T);
  const char* bytes = reinterpret_cast<const char*>(family);
  for (std::size_t at = 0; at < nbytes && at < 4 * kLine; at += kLine) __builtin_prefetch(bytes + at, 0, 3);
}

// Picks, without branches, the first of Width siblings whose inclusive prefix sum exceeds target, and lowers target by
// the sum of the siblings before it. Does not read the last sibling: the caller ensures target < sum of all.
template <unsigned Width, class T>
[[gnu::always_inline]] inline unsigned pick_among(const T* siblings, std::uint64_t& target) {
  std::uint64_t sum = 0;
  std::uint64_t before = 0;
  unsigned pick = 0;
  for (unsigned k = 0; k + 1 < Width; ++k) {
    sum += siblings[k];
    const bool passed = sum <= target;
    before = passed ? sum : before;
    pick += passed;
  }
  target -= before;
  return pick;
}

// ReplayKernels::scan, with integers and without branches, so that compilers vectorise it.
[[gnu::always_inline]] inline PriorityScan scan_of(const float* priorities, std::size_t count) {
  constexpr std::uint32_t kInfinity = 0x7F800000, kMinusZero = 0x80000000;
  std::int32_t largest = 0;
  std::uint32_t wrong = 0;
  PriorityScan found{true, 0.0f, 0};
  for (std::size_t start = 0; start < count; start += kScanned) {
    const std::size_t end = count - start < kScanned ? count : start + kScanned;
    std::uint32_t infinite = 0;
    for (std::size_t i = start; i < end; ++i) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, priorities + i, sizeof bits);
      wrong |= static_cast<std::uint32_t>(bits > kInfinity) & static_cast<std::uint32_t>(bits != kMinusZero);
      infinite += bits == kInfinity;
      const auto finite = static_cast<std::int32_t>(bits < kInfinity ? bits : 0);
      largest = finite > largest ? finite : largest;
    }
    found.infinite += infinite;
  }
  found.valid = wrong == 0;
  __builtin_memcpy(&found.largest, &largest, sizeof largest);
  return found;
}

// ReplayKernels::all_below: an index out of range makes itself or the difference negative.
[[gnu::always_inline]] inline bool all_below_of(const std::int64_t* indices, std::size_t count, std::size_t end) {
  const std::uint64_t last = std::uint64_t{end} - 1;
  std::uint64_t outside = end == 0 ? ~std::uint64_t{0} : 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto index = static_cast<std::uint64_t>(indices[i]);
    outside |= index | (last - index);
  }
  return count == 0 || outside >> 63 == 0;
}

}  // namespace

// The body of a Find. A macro, because a function cannot inherit its caller's instruction set. PICK_NODE<K> and
// PICK_LEAF<K> pick among K siblings and lower the target.
#define PEARL_DESCEND(K, PICK_NODE, PICK_LEAF)                                                    \
  constexpr int kShift = std::countr_zero(K);                                                     \
  for (std::size_t start = 0; start < count; start += kDescentGroup) {                            \
    const std::size_t end = count - start < kDescentGroup ? count : start + kDescentGroup;        \
    for (std::size_t at = level; at > 0; --at) {                                                  \
      const std::uint64_t* sums = tree.sums[at - 1];                                              \
      for (std::size_t j = start; j < end; ++j) {                                                 \
        const std::size_t first = static_cast<std::size_t>(places[j]) << kShift;                  \
        const std::size_t node = first + PICK_NODE<K>(sums + first, rest[j]);                     \
        places[j] = static_cast<std::int64_t>(node);                                              \
        if (at > 1)                                                                               \
          prefetch_family<K>(tree.sums[at - 2] + (node << kShift));                               \
        else                                                                                      \
          prefetch_family<K>(tree.leaves + (node << kShift));                                     \
      }                                                                                           \
    }                                                                                             \
    for (std::size_t j = start; j < end; ++j) {                                                   \
      const std::size_t first = static_cast<std::size_t>(places[j]) << kShift;                    \
      const std::size_t leaf = first + PICK_LEAF<K>(tree.leaves + first, rest[j]);                \
      places[j] = static_cast<std::int64_t>(leaf);                                                \
      values[j] = tree.leaves[leaf];                                                              \
    }                                                                                             \
  }

}  // namespace pearl
