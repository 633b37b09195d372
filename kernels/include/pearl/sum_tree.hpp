// K-ary sum tree of priorities (the paper's Replay Manager): uint32 leaves, uint64 sums, exact for any order of
// updates.
//
// Layout: one array per level, children of node i at [i * K, (i + 1) * K), so that siblings are contiguous and a group
// of sixteen leaves is one cache line. Level 0 holds the leaves; the last level has one node, the total.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pearl {

class SumTree {
 public:
  virtual ~SumTree() = default;

  // For each target (below total()), the first leaf whose inclusive prefix sum exceeds it, and that leaf's value.
  // Overwrites the targets. `ascending`: 0, or the size of the sorted batch that these targets are (part of), which saves
  // the search of the upper levels. Threads may search at the same time.
  virtual void find(std::uint64_t* targets, std::size_t count, std::size_t ascending, std::int64_t* indices,
                    std::uint32_t* values) const = 0;
  // The sum of the leaves before `leaf`.
  virtual std::uint64_t sum_before(std::size_t leaf) const = 0;
  // Sets leaves in order: the last of duplicates wins.
  void assign(const std::int64_t* indices, const std::uint32_t* values, std::size_t count);
  // assign() for a part of a batch of `batch` leaves; prefetches the leaves `ahead`. Sums are valid only after finish()
  // with the sum of all parts' Growth. Threads may assign at the same time, each its own whole runs of granule(batch)
  // leaves.
  struct Growth {
    std::ptrdiff_t positive = 0;
    std::uint64_t large = 0;  // modulo 2^64
    void add(const Growth& other) {
      positive += other.positive;
      large += other.large;
    }
  };
  virtual Growth assign_part(const std::int64_t* indices, const std::uint32_t* values, std::size_t count,
                             std::size_t batch, const std::int64_t* ahead, std::size_t ahead_count) = 0;
  virtual void finish(std::size_t batch, const Growth& grown) = 0;
  virtual std::size_t granule(std::size_t batch) const = 0;
  // Sets leaves first..first+count-1, in fewer steps.
  virtual void assign_range(std::size_t first, const std::uint32_t* values, std::size_t count) = 0;
  // Recomputes every sum from the leaves, in one pass.
  virtual void rebuild() = 0;
  virtual std::uint64_t total() const = 0;
  virtual std::uint32_t* leaves() = 0;

  static constexpr std::size_t kPart = 64;  // leaves of a part: two parts with their paths fit the L1 cache
  // Leaves above zero.
  std::size_t positive() const { return positive_; }
  // Whether to maintain large(), from the next rebuild() on; slows each assignment a little.
  void watch_large(bool wanted) { watches_large_ = wanted; }
  // The sum of large() of all leaves (pearl/quantise.hpp).
  std::uint64_t large() const { return large_; }
  std::size_t capacity() const { return capacity_; }
  unsigned fanout() const { return fanout_; }

 protected:
  SumTree(std::size_t capacity, unsigned fanout) : capacity_(capacity), fanout_(fanout) {}

  std::size_t positive_ = 0;
  std::uint64_t large_ = 0;
  bool watches_large_ = false;

 private:
  std::size_t capacity_;
  unsigned fanout_;
};

// `fanout` is a power of two from 2 to 256; throws ReplayError otherwise.
std::unique_ptr<SumTree> make_sum_tree(std::size_t capacity, unsigned fanout);

}  // namespace pearl
