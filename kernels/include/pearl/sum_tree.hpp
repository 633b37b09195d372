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
  virtual void find(const std::uint64_t* targets, std::size_t count, std::int64_t* indices,
                    std::uint32_t* values) const = 0;
  // Sets leaves in order, so that of duplicates the last wins.
  virtual void assign(const std::int64_t* indices, const std::uint32_t* values, std::size_t count) = 0;
  // Recomputes every sum from the leaves, in one pass.
  virtual void rebuild() = 0;
  virtual std::uint64_t total() const = 0;
  virtual std::uint32_t* leaves() = 0;

  std::size_t capacity() const { return capacity_; }
  unsigned fanout() const { return fanout_; }

 protected:
  SumTree(std::size_t capacity, unsigned fanout) : capacity_(capacity), fanout_(fanout) {}

 private:
  std::size_t capacity_;
  unsigned fanout_;
};

// `fanout` is a power of two from 2 to 256; throws ReplayError otherwise.
std::unique_ptr<SumTree> make_sum_tree(std::size_t capacity, unsigned fanout);

}  // namespace pearl
