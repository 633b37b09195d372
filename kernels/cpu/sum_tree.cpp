#include "pearl/sum_tree.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/errors.hpp"
#include "pearl/quantise.hpp"
#include "pearl/replay_kernels.hpp"

namespace pearl {
namespace {

template <unsigned K>
class KarySumTree final : public SumTree {
  static constexpr int kShift = std::countr_zero(K);

 public:
  explicit KarySumTree(std::size_t capacity)
      : SumTree(capacity, K), leaves_(round_up(capacity, K < 16 ? 16 : K)) {
    std::size_t nodes = capacity;
    do {
      nodes = (nodes + K - 1) >> kShift;
      nodes_.push_back(nodes);
      sums_.emplace_back(nodes == 1 ? 1 : round_up(nodes, K));
    } while (nodes > 1);
    for (auto& sums : sums_) levels_.push_back(sums.data());
  }

  void find(std::uint64_t* targets, std::size_t count, std::size_t ascending, std::int64_t* indices,
            std::uint32_t* values) const override {
    if (count == 0) return;
    std::size_t level = top();
    // A step along a level costs about twice as much as one target's descent by one level.
    while (level > 0 && 2 * nodes_[level - 1] <= ascending) --level;
    if (level == top())
      std::fill_n(indices, count, 0);
    else
      walk(level, targets, count, indices);
    replay_kernels().find[kShift]({leaves_.data(), levels_.data(), levels_.size()}, level, targets, count, indices,
                                  values);
  }

  std::uint64_t sum_before(std::size_t leaf) const override {
    std::size_t node = leaf >> kShift;
    std::uint64_t before = sum_of(leaves_.data() + (node << kShift), leaves_.data() + leaf);
    for (std::size_t level = 0; level < top(); ++level) {
      const std::uint64_t* sums = levels_[level];
      const std::size_t parent = node >> kShift;
      before += sum_of(sums + (parent << kShift), sums + node);
      node = parent;
    }
    return before;
  }

  Growth assign_part(const std::int64_t* indices, const std::uint32_t* values, std::size_t count, std::size_t batch,
                     const std::int64_t* ahead, std::size_t ahead_count) override {
    return watches_large_ ? assign_leaves<true>(indices, values, count, batch, ahead, ahead_count)
                          : assign_leaves<false>(indices, values, count, batch, ahead, ahead_count);
  }

  void finish(std::size_t batch, const Growth& grown) override {
    positive_ += static_cast<std::size_t>(grown.positive);
    large_ += grown.large;
    for (std::size_t level = levels_one_by_one(batch); level < levels_.size(); ++level)
      sum_range(level, 0, nodes_[level]);
  }

  std::size_t granule(std::size_t batch) const override {
    return std::size_t{1} << (kShift * static_cast<int>(levels_one_by_one(batch)));
  }

  void assign_range(std::size_t first, const std::uint32_t* values, std::size_t count) override {
    if (count == 0) return;
    std::uint32_t* leaves = leaves_.data() + first;
    positive_ -= above_zero(leaves, count);
    if (watches_large_) large_ -= sum_of_large(leaves, count);
    std::copy_n(values, count, leaves);
    positive_ += above_zero(leaves, count);
    if (watches_large_) large_ += sum_of_large(leaves, count);
    std::size_t last = first + count - 1;
    for (std::size_t level = 0; level < levels_.size(); ++level) {
      first >>= kShift;
      last >>= kShift;
      sum_range(level, first, last + 1);
    }
  }

  void rebuild() override {
    for (std::size_t level = 0; level < levels_.size(); ++level) sum_range(level, 0, nodes_[level]);
    positive_ = above_zero(leaves_.data(), leaves_.size());
    large_ = watches_large_ ? sum_of_large(leaves_.data(), leaves_.size()) : 0;
  }

  std::uint64_t total() const override { return levels_.back()[0]; }
  std::uint32_t* leaves() override { return leaves_.data(); }

 private:
  template <bool watched>
  Growth assign_leaves(const std::int64_t* indices, const std::uint32_t* values, std::size_t count, std::size_t batch,
                       const std::int64_t* ahead, std::size_t ahead_count) {
    std::uint32_t* leaves = leaves_.data();
    const std::size_t levels = levels_one_by_one(batch);
    Growth grown;
    for (std::size_t i = 0; i < count; ++i) {
      if (i < ahead_count) prefetch_path(static_cast<std::size_t>(ahead[i]));
      std::size_t node = static_cast<std::size_t>(indices[i]);
      const std::uint32_t before = leaves[node];
      const std::uint32_t after = values[i];
      leaves[node] = after;
      grown.positive += static_cast<std::ptrdiff_t>(after != 0) - static_cast<std::ptrdiff_t>(before != 0);
      if constexpr (watched) grown.large += std::uint64_t{pearl::large(after)} - pearl::large(before);
      // Differences wrap modulo 2^64, so one addition serves both signs.
      const std::uint64_t difference = std::uint64_t{after} - std::uint64_t{before};
      for (std::size_t level = 0; level < levels; ++level) {
        node >>= kShift;
        levels_[level][node] += difference;
      }
    }
    for (std::size_t i = count; i < ahead_count; ++i) prefetch_path(static_cast<std::size_t>(ahead[i]));
    return grown;
  }

  static std::size_t above_zero(const std::uint32_t* leaves, std::size_t count) {
    return static_cast<std::size_t>(std::count_if(leaves, leaves + count, [](std::uint32_t leaf) { return leaf != 0; }));
  }

  template <class T>
  static std::uint64_t sum_of(const T* first, const T* end) {
    return std::accumulate(first, end, std::uint64_t{0});
  }

  std::size_t top() const { return levels_.size() - 1; }

  // The lower levels, where adding a batch's differences is cheaper than summing all children again.
  std::size_t levels_one_by_one(std::size_t batch) const {
    std::size_t level = 1;
    while (level < levels_.size() && nodes_[level - 1] > 4 * batch) ++level;
    return level;
  }

  void prefetch_path(std::size_t leaf) const {
    __builtin_prefetch(leaves_.data() + leaf, 1, 3);
    __builtin_prefetch(levels_[0] + (leaf >> kShift), 1, 3);
    if (levels_.size() > 1) __builtin_prefetch(levels_[1] + (leaf >> 2 * kShift), 1, 3);
  }

  // For each ascending target, the node of a level that holds it; lowers the target by the sum of the nodes before.
  void walk(std::size_t level, std::uint64_t* targets, std::size_t count, std::int64_t* nodes) const {
    std::size_t node = 0;
    std::uint64_t before = 0;
    for (std::size_t at = top(); at > level; --at) {  // down to the first
      const std::uint64_t* sums = levels_[at - 1];
      node <<= kShift;
      while (targets[0] - before >= sums[node]) before += sums[node++];
    }
    const std::uint64_t* sums = levels_[level];
    std::uint64_t end = before + sums[node];
    for (std::size_t i = 0; i < count; ++i) {
      while (targets[i] >= end) {
        before = end;
        end += sums[++node];
      }
      nodes[i] = static_cast<std::int64_t>(node);
      targets[i] -= before;
    }
  }

  // Recomputes nodes first..end-1 of a level. Families are whole: places after the last child are zero.
  void sum_range(std::size_t level, std::size_t first, std::size_t end) {
    if (level == 0)
      sum_families(leaves_.data(), first, end, levels_[0]);
    else
      sum_families(levels_[level - 1], first, end, levels_[level]);
  }

  template <class T>
  static void sum_families(const T* children, std::size_t first, std::size_t end, std::uint64_t* parents) {
    for (std::size_t parent = first; parent < end; ++parent) {
      const T* family = children + (parent << kShift);
      std::uint64_t sum = 0;
      for (unsigned child = 0; child < K; ++child) sum += family[child];
      parents[parent] = sum;
    }
  }

  AlignedArray<std::uint32_t> leaves_;
  std::vector<std::size_t> nodes_;                    // nodes with leaves below them, per level of sums
  std::vector<AlignedArray<std::uint64_t>> sums_;     // sums_[0] are the parents of leaves; the last has one node
  std::vector<std::uint64_t*> levels_;                // their data
};

}  // namespace

void SumTree::assign(const std::int64_t* indices, const std::uint32_t* values, std::size_t count) {
  Growth grown = assign_part(nullptr, nullptr, 0, count, indices, std::min(count, kPart));
  for (std::size_t start = 0; start < count; start += kPart) {
    const std::size_t end = std::min(start + kPart, count);
    grown.add(assign_part(indices + start, values + start, end - start, count, indices + end,
                          std::min(end + kPart, count) - end));
  }
  finish(count, grown);
}

std::unique_ptr<SumTree> make_sum_tree(std::size_t capacity, unsigned fanout) {
  switch (fanout) {
    case 2: return std::make_unique<KarySumTree<2>>(capacity);
    case 4: return std::make_unique<KarySumTree<4>>(capacity);
    case 8: return std::make_unique<KarySumTree<8>>(capacity);
    case 16: return std::make_unique<KarySumTree<16>>(capacity);
    case 32: return std::make_unique<KarySumTree<32>>(capacity);
    case 64: return std::make_unique<KarySumTree<64>>(capacity);
    case 128: return std::make_unique<KarySumTree<128>>(capacity);
    case 256: return std::make_unique<KarySumTree<256>>(capacity);
    default:
      throw ReplayError("Fanout must be a power of two from 2 to 256; found " + std::to_string(fanout) + ".");
  }
}

}  // namespace pearl
