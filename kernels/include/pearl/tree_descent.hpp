// The descent of a K-ary sum tree, common to all variants of the kernels. Included by kernels/cpu/replay_kernels*.cpp
// alone: everything is local to the file that includes it, so that code for one instruction set never serves another.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "pearl/replay_kernels.hpp"

namespace pearl {
namespace {

constexpr std::size_t kDescentGroup = 64;  // queries descending together: as many cache misses in flight

// Touches the start of a family of K siblings; the hardware prefetcher follows on long ones.
template <unsigned K, class T>
[[gnu::always_inline]] inline void prefetch_family(const T* family) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t nbytes = K * sizeof(T);
  const char* bytes = reinterpret_cast<const char*>(family);
  for (std::size_t at = 0; at < nbytes && at < 4 * kLine; at += kLine) __builtin_prefetch(bytes + at, 0, 3);
}

// Picks, without branches, the first of Width siblings whose inclusive prefix sum exceeds target, which it lowers by
// the sum of those before. The last needs no look: the caller vouches that target is below the sum of all.
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

}  // namespace

// The body of a Find, a macro because a function cannot inherit its caller's instruction set. PICK_NODE<K> and
// PICK_LEAF<K> pick among K siblings and lower the target.
#define PEARL_DESCEND(K, PICK_NODE, PICK_LEAF)                                                    \
  constexpr int kShift = std::countr_zero(K);                                                     \
  std::uint64_t rest[kDescentGroup];                                                              \
  std::size_t node[kDescentGroup];                                                                \
  for (std::size_t start = 0; start < count; start += kDescentGroup) {                            \
    const std::size_t group = count - start < kDescentGroup ? count - start : kDescentGroup;      \
    for (std::size_t j = 0; j < group; ++j) {                                                     \
      rest[j] = targets[start + j];                                                               \
      node[j] = 0;                                                                                \
    }                                                                                             \
    for (std::size_t level = tree.count - 1; level-- > 0;) {                                      \
      const std::uint64_t* sums = tree.sums[level];                                               \
      for (std::size_t j = 0; j < group; ++j) {                                                   \
        const std::size_t first = node[j] << kShift;                                              \
        node[j] = first + PICK_NODE<K>(sums + first, rest[j]);                                    \
        if (level > 0)                                                                            \
          prefetch_family<K>(tree.sums[level - 1] + (node[j] << kShift));                         \
        else                                                                                      \
          prefetch_family<K>(tree.leaves + (node[j] << kShift));                                  \
      }                                                                                           \
    }                                                                                             \
    for (std::size_t j = 0; j < group; ++j) {                                                     \
      const std::size_t first = node[j] << kShift;                                                \
      const std::size_t leaf = first + PICK_LEAF<K>(tree.leaves + first, rest[j]);                \
      indices[start + j] = static_cast<std::int64_t>(leaf);                                       \
      values[start + j] = tree.leaves[leaf];                                                      \
    }                                                                                             \
  }

}  // namespace pearl
