// The distribution of actions that a policy network's outputs describe, as in pearl/algorithms/on_policy.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "pearl/learner/network.hpp"

namespace pearl::learner {

// The logit of a choice that a mask forbids, as in pearl/action_masks.py: its probability is 0. Not infinite, as entropies
// multiply by it.
inline constexpr float kForbiddenLogit = -1e8f;

inline constexpr float kHalfLog2Pi = 0.9189385332046727f;  // of normal densities

struct ActionDistribution {
  std::vector<std::size_t> sizes;  // logits of each categorical part; empty: a normal distribution around the outputs
  std::size_t size = 0;            // numbers of one action: parts, or outputs
  std::ptrdiff_t log_std = kNone;  // a normal distribution's log deviations `(size,)`: their offset in the parameters

  bool categorical() const { return !sizes.empty(); }
  std::size_t outputs() const {
    return categorical() ? std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}) : size;
  }
  std::size_t item_bytes() const { return size * (categorical() ? sizeof(std::int64_t) : sizeof(float)); }
};

// A network of the distribution's outputs, and one of values, of the same observations. Networks are the caller's.
struct PolicyAndValue {
  const Network *policy, *value;
  ActionDistribution distribution;

  // Throws LearnerError unless networks and distribution fit each other.
  void check() const;
};

}  // namespace pearl::learner
