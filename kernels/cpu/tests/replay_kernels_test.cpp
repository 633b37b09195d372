#include "pearl/replay_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "pearl/errors.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/sum_tree.hpp"

namespace {

using namespace pearl;

// Odd counts leave part of a vector over.
const std::vector<std::size_t> kCounts = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 1000};

std::vector<float> edge_priorities() {
  using Limits = std::numeric_limits<float>;
  std::vector<float> priorities = {0.0f,  -0.0f, Limits::denorm_min(), Limits::min(), std::nextafter(Limits::min(), 0.0f),
                                   1e-30f, 0.5f, 1.0f, std::nextafter(1.0f, 0.0f), std::nextafter(1.0f, 2.0f), 255.99999f,
                                   256.0f, 1e30f, Limits::max(), Limits::infinity()};
  std::mt19937 random(4);
  while (priorities.size() < 5000) {
    const std::uint32_t bits = random() % 0x7F800001u;  // any priority there is
    float priority;
    std::memcpy(&priority, &bits, sizeof priority);
    priorities.push_back(priority);
  }
  return priorities;
}

void leaves_are_those_of_quantise(const ReplayKernels& kernels) {
  const std::vector<float> priorities = edge_priorities();
  for (const double alpha : {0.0, 0.3, 0.6, 1.0, 4.0})
    for (const int scale : {63, 20, 0, -400, -(1 << 29)}) {
      std::vector<std::uint32_t> leaves(priorities.size());
      kernels.quantise(priorities.data(), priorities.size(), exponent_q28(alpha), scale, leaves.data());
      for (std::size_t i = 0; i < priorities.size(); ++i)
        CHECK(leaves[i] == quantise(priorities[i], exponent_q28(alpha), scale));
    }
  for (const std::size_t count : kCounts) {
    std::vector<std::uint32_t> leaves(count + 1, 77);
    kernels.quantise(priorities.data(), count, exponent_q28(0.6), 20, leaves.data());
    CHECK(leaves[count - 1] == quantise(priorities[count - 1], exponent_q28(0.6), 20));
    CHECK(leaves[count] == 77);
  }
}

void weights_are_those_of_importance_weight(const ReplayKernels& kernels) {
  std::mt19937 random(5);
  for (const std::size_t count : kCounts)
    for (const double beta : {0.0, 0.4, 1.0, 4.0}) {
      std::vector<std::uint32_t> leaves(count);
      for (auto& leaf : leaves) leaf = (random() % kLeafMax >> random() % 28) + 1;
      leaves[random() % count] = kLeafMax;
      std::vector<float> weights(count + 1, 77.0f);
      kernels.weights(leaves.data(), count, exponent_q28(beta), weights.data());
      const std::int64_t log2_min = log2_q32(*std::min_element(leaves.begin(), leaves.end()));
      for (std::size_t i = 0; i < count; ++i)
        CHECK(weights[i] == importance_weight(log2_min, log2_q32(leaves[i]), exponent_q28(beta)));
      CHECK(weights[count] == 77.0f);
    }
}

void targets_are_those_of_philox(const ReplayKernels& kernels) {
  std::mt19937_64 random(6);
  for (const std::size_t lanes : kCounts)
    for (const std::uint64_t total : {std::uint64_t{1}, std::uint64_t{random() >> 20}, ~std::uint64_t{0}}) {
      const std::uint64_t seed = random();
      const std::uint64_t call = random();
      std::vector<std::uint64_t> targets(lanes + 1, 77);
      kernels.targets(seed, call, lanes, 0, lanes, total, targets.data());
      for_each_stratified(seed, call, lanes, [&](std::uint64_t lane, std::uint64_t x) {
        CHECK(targets[lane] == mulhi64(total, x));
      });
      CHECK(targets[lanes] == 77);
      const std::size_t first = lanes / 4 * 2;
      std::vector<std::uint64_t> part(lanes - first);
      kernels.targets(seed, call, lanes, first, part.size(), total, part.data());
      CHECK(std::equal(part.begin(), part.end(), targets.begin() + static_cast<std::ptrdiff_t>(first)));
    }
}

void trees_of_every_fanout_find_the_same_leaves() {
  std::mt19937_64 random(1);
  for (const std::size_t capacity : {1, 2, 15, 16, 17, 255, 256, 257, 1000, 4097, 70000}) {
    std::vector<std::uint32_t> leaves(capacity);
    for (const bool full : {false, true}) {
      // Full: each leaf the largest there is, so that sixteen come closest to 2^32.
      for (auto& leaf : leaves)
        leaf = full ? kLeafMax : random() % 3 == 0 ? 0 : static_cast<std::uint32_t>(random() % kLeafMax) + 1;
      leaves[random() % capacity] = kLeafMax;
      std::vector<std::int64_t> slots(capacity);
      std::iota(slots.begin(), slots.end(), 0);
      std::vector<std::uint64_t> ends(capacity);
      std::uint64_t end = 0;
      for (std::size_t i = 0; i < capacity; ++i) ends[i] = end += leaves[i];
      std::vector<std::uint64_t> targets = {0, ends.back() - 1};
      for (int i = 0; i < 150; ++i) {
        targets.push_back(random() % ends.back());
        end = ends[random() % capacity];  // where one leaf gives way to the next
        if (end > 0) targets.push_back(end - 1);
        if (end < ends.back()) targets.push_back(end);
      }
      for (unsigned fanout = 2; fanout <= 256; fanout *= 2) {
        const auto tree = make_sum_tree(capacity, fanout);
        tree->assign(slots.data(), leaves.data(), capacity);
        CHECK(tree->total() == ends.back());
        for (const std::string& name : replay_kernel_variants()) {
          select_replay_kernels(name);
          std::vector<std::int64_t> found(targets.size());
          std::vector<std::uint32_t> values(targets.size());
          tree->find(targets.data(), targets.size(), found.data(), values.data());
          for (std::size_t i = 0; i < targets.size(); ++i) {
            const auto expected = std::upper_bound(ends.begin(), ends.end(), targets[i]) - ends.begin();
            CHECK(found[i] == expected);
            CHECK(values[i] == leaves[static_cast<std::size_t>(expected)]);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const std::string& name : replay_kernel_variants()) {
    select_replay_kernels(name);
    CHECK(replay_kernels().name == name);
    leaves_are_those_of_quantise(replay_kernels());
    weights_are_those_of_importance_weight(replay_kernels());
    targets_are_those_of_philox(replay_kernels());
  }
  trees_of_every_fanout_find_the_same_leaves();
  CHECK(throws<ReplayError>([] { select_replay_kernels("sse9"); }));
}
