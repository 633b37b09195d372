#include "pearl/sum_tree.hpp"

#include <bit>
#include <string>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/errors.hpp"

namespace pearl {
namespace {

constexpr std::size_t kGroup = 16;  // queries descending together: as many cache misses in flight

template <class T>
inline void prefetch(const T* address) {
  __builtin_prefetch(address, 0, 3);
}

// Touches the start of a family of K siblings; the hardware prefetcher follows on long ones.
template <unsigned K, class T>
inline void prefetch_family(const T* family) {
  constexpr std::size_t nbytes = K * sizeof(T);
  const char* bytes = reinterpret_cast<const char*>(family);
  for (std::size_t at = 0; at < nbytes && at < 4 * kCacheLine; at += kCacheLine) prefetch(bytes + at);
}

// Picks, without branches, the first of Width siblings whose inclusive prefix sum exceeds target, which it lowers by
// the sum of those before. The last needs no look: the caller vouches that target is below the sum of all.
template <unsigned Width, class T>
inline unsigned pick_among(const T* siblings, std::uint64_t& target) {
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

template <unsigned Width, class T>
inline std::uint64_t sum_of(const T* siblings) {
  std::uint64_t sum = 0;
  for (unsigned k = 0; k < Width; ++k) sum += siblings[k];
  return sum;
}

template <unsigned K, class T>
inline unsigned pick_child(const T* siblings, std::uint64_t& target) {
  if constexpr (K <= 4) {
    return pick_among<K>(siblings, target);
  } else if constexpr (K <= 16) {
    // First the quarter, then the child: half the comparisons of one pass.
    std::uint64_t quarters[K / 4];
    for (unsigned i = 0; i < K / 4; ++i) quarters[i] = sum_of<4>(siblings + 4 * i);
    const unsigned first = 4 * pick_among<K / 4>(quarters, target);
    return first + pick_among<4>(siblings + first, target);
  } else {
    unsigned first = 0;
    for (; first + 16 < K; first += 16) {
      const std::uint64_t sum = sum_of<16>(siblings + first);
      if (target < sum) break;
      target -= sum;
    }
    return first + pick_child<16>(siblings + first, target);
  }
}

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
  }

  void find(const std::uint64_t* targets, std::size_t count, std::int64_t* indices,
            std::uint32_t* values) const override {
    std::uint64_t rest[kGroup];
    std::size_t node[kGroup];
    for (std::size_t start = 0; start < count; start += kGroup) {
      const std::size_t group = count - start < kGroup ? count - start : kGroup;
      for (std::size_t j = 0; j < kGroup; ++j) {
        rest[j] = j < group ? targets[start + j] : 0;
        node[j] = 0;
      }
      for (std::size_t level = sums_.size() - 1; level-- > 0;) {
        const std::uint64_t* sums = sums_[level].data();
        for (std::size_t j = 0; j < group; ++j) {
          node[j] = (node[j] << kShift) + pick_child<K>(sums + (node[j] << kShift), rest[j]);
          if (level > 0)
            prefetch_family<K>(sums_[level - 1].data() + (node[j] << kShift));
          else
            prefetch_family<K>(leaves_.data() + (node[j] << kShift));
        }
      }
      for (std::size_t j = 0; j < group; ++j) {
        const std::size_t first = node[j] << kShift;
        const std::size_t leaf = first + pick_child<K>(leaves_.data() + first, rest[j]);
        indices[start + j] = static_cast<std::int64_t>(leaf);
        values[start + j] = leaves_[leaf];
      }
    }
  }

  void assign(const std::int64_t* indices, const std::uint32_t* values, std::size_t count) override {
    const std::size_t top = sums_.size() - 1;
    const std::size_t ahead = count < kGroup ? count : kGroup;
    for (std::size_t i = 0; i < ahead; ++i) prefetch_path(static_cast<std::size_t>(indices[i]));
    std::uint64_t total = sums_[top][0];
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kGroup < count) prefetch_path(static_cast<std::size_t>(indices[i + kGroup]));
      std::size_t node = static_cast<std::size_t>(indices[i]);
      // Deltas wrap modulo 2^64, so one addition serves both signs.
      const std::uint64_t delta = std::uint64_t{values[i]} - std::uint64_t{leaves_[node]};
      leaves_[node] = values[i];
      for (std::size_t level = 0; level < top; ++level) {
        node >>= kShift;
        sums_[level][node] += delta;
      }
      total += delta;
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
