#include "pearl/sum_tree.hpp"

#include <bit>
#include <string>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/errors.hpp"
#include "pearl/replay_kernels.hpp"

namespace pearl {
namespace {

constexpr std::size_t kGroup = 64;  // updates whose paths are fetched while the group before is applied

template <unsigned K>
class KarySumTree final : public SumTree {
  static constexpr int kShift = std::countr_zero(K);

 public:
  explicit KarySumTree(std::size_t capacity)
      : SumTree(capacity, K), leaves_(round_up(capacity, K < 16 ? 16 : K)) {
    std::size_t nodes = capacity;
    do {
      nodes = (nodes + K - 1) >> kShift;
      sums_.emplace_back(nodes == 1 ? 1 : round_up(nodes, K));
    } while (nodes > 1);
    for (const auto& sums : sums_) levels_.push_back(sums.data());
  }

  void find(const std::uint64_t* targets, std::size_t count, std::int64_t* indices,
            std::uint32_t* values) const override {
    replay_kernels().find[kShift]({leaves_.data(), levels_.data(), levels_.size()}, targets, count, indices, values);
  }

  void assign(const std::int64_t* indices, const std::uint32_t* values, std::size_t count) override {
    std::uint64_t delta[kGroup];
    std::size_t node[kGroup];
    const std::size_t top = sums_.size() - 1;
    std::uint64_t total = sums_[top][0];
    for (std::size_t i = 0; i < count && i < kGroup; ++i) prefetch_path(static_cast<std::size_t>(indices[i]));
    for (std::size_t start = 0; start < count; start += kGroup) {
      const std::size_t group = count - start < kGroup ? count - start : kGroup;
      const std::size_t next = count - start - group < kGroup ? count - start - group : kGroup;
      for (std::size_t j = 0; j < next; ++j) prefetch_path(static_cast<std::size_t>(indices[start + group + j]));
      std::uint32_t* leaves = leaves_.data();
      for (std::size_t j = 0; j < group; ++j) {
        node[j] = static_cast<std::size_t>(indices[start + j]);
        // Deltas wrap modulo 2^64, so one addition serves both signs.
        delta[j] = std::uint64_t{values[start + j]} - std::uint64_t{leaves[node[j]]};
        leaves[node[j]] = values[start + j];
        total += delta[j];
      }
      for (std::size_t j = 0; j < group; ++j) {
        std::size_t parent = node[j];
        for (std::size_t level = 0; level < top; ++level) {
          parent >>= kShift;
          sums_[level][parent] += delta[j];
        }
      }
    }
    sums_[top][0] = total;
  }

  void rebuild() override {
    sum_level(leaves_.data(), leaves_.size(), 0);
    for (std::size_t level = 1; level < sums_.size(); ++level)
      sum_level(sums_[level - 1].data(), sums_[level - 1].size(), level);
  }

  std::uint64_t total() const override { return sums_.back()[0]; }
  std::uint32_t* leaves() override { return leaves_.data(); }

 private:
  void prefetch_path(std::size_t leaf) const {
    __builtin_prefetch(leaves_.data() + leaf, 1, 3);
    if (sums_.size() > 1) __builtin_prefetch(sums_[0].data() + (leaf >> kShift), 1, 3);
    if (sums_.size() > 2) __builtin_prefetch(sums_[1].data() + (leaf >> 2 * kShift), 1, 3);
  }

  template <class T>
  void sum_level(const T* children, std::size_t size, std::size_t level) {
    AlignedArray<std::uint64_t>& parents = sums_[level];
    for (std::size_t parent = 0; parent < parents.size() && parent << kShift < size; ++parent) {
      std::uint64_t sum = 0;
      const std::size_t first = parent << kShift;
      const std::size_t end = first + K < size ? first + K : size;
      for (std::size_t child = first; child < end; ++child) sum += children[child];
      parents[parent] = sum;
    }
  }

  AlignedArray<std::uint32_t> leaves_;
  std::vector<AlignedArray<std::uint64_t>> sums_;  // sums_[0] are the parents of leaves; the last has one node
  std::vector<const std::uint64_t*> levels_;  // where they lie
};

}  // namespace

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
