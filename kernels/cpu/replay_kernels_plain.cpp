// The Replay Manager's hot loops in C++ for any machine.
#include "pearl/replay_kernels.hpp"

#include <algorithm>

#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/tree_descent.hpp"

namespace pearl {
namespace {

void quantise_all(const float* priorities, std::size_t count, std::int64_t alpha_q28, int scale,
                  std::uint32_t* leaves) {
  for (std::size_t i = 0; i < count; ++i) leaves[i] = quantise(priorities[i], alpha_q28, scale);
}

std::uint32_t smallest(const std::uint32_t* leaves, std::size_t count) {
  std::uint32_t least = ~0u;
  for (std::size_t i = 0; i < count; ++i) least = std::min(least, leaves[i]);
  return least;
}

void weights_of(const std::uint32_t* leaves, std::size_t count, std::uint32_t smallest, std::int64_t beta_q28,
                float* weights) {
  const std::int64_t log2_min = log2_q32(smallest);
  for (std::size_t i = 0; i < count; ++i) weights[i] = importance_weight(log2_min, log2_q32(leaves[i]), beta_q28);
}

void numbers_of(std::uint64_t seed, std::uint64_t call, std::uint64_t first, std::size_t count,
                std::uint64_t* numbers) {
  for_lanes(seed, call, 0, first, count, [&](std::uint64_t lane, std::uint64_t x) { numbers[lane - first] = x; });
}

void targets_of(std::uint64_t seed, std::uint64_t call, std::uint64_t lanes, std::uint64_t first, std::size_t count,
                std::uint64_t total, std::uint64_t* targets) {
  for_lanes(seed, call, stratum_width(lanes), first, count,
            [&](std::uint64_t lane, std::uint64_t x) { targets[lane - first] = mulhi64(total, x); });
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

PriorityScan scan(const float* priorities, std::size_t count) { return scan_of(priorities, count); }

bool all_below(const std::int64_t* indices, std::size_t count, std::size_t end) {
  return all_below_of(indices, count, end);
}

template <unsigned K>
void find(const TreeLevels& tree, std::size_t level, std::uint64_t* rest, std::size_t count, std::int64_t* places,
          std::uint32_t* values) {
  PEARL_DESCEND(K, pick_child, pick_child)
}

}  // namespace

const ReplayKernels& plain_replay_kernels() {
  static constexpr ReplayKernels kernels = {
      "plain",
      quantise_all,
      smallest,
      weights_of,
      numbers_of,
      targets_of,
      scan,
      all_below,
      {nullptr, find<2>, find<4>, find<8>, find<16>, find<32>, find<64>, find<128>, find<256>}};
  return kernels;
}

}  // namespace pearl
