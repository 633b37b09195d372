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
    const std::uint32_t bits = random() % 0x7F800001u;  // any valid priority
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
      const std::uint32_t smallest = *std::min_element(leaves.begin(), leaves.end());
      CHECK(kernels.smallest(leaves.data(), count) == smallest);
      kernels.weights(leaves.data(), count, smallest, exponent_q28(beta), weights.data());
      const std::int64_t log2_min = log2_q32(smallest);
      for (std::size_t i = 0; i < count; ++i)
        CHECK(weights[i] == importance_weight(log2_min, log2_q32(leaves[i]), exponent_q28(beta)));
      CHECK(weights[count] == 77.0f);
    }
}

void numbers_are_those_of_philox(const ReplayKernels& kernels) {
  std::mt19937_64 random(7);
  for (const std::size_t count : kCounts)
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{6}, std::uint64_t{1} << 40}) {
      const std::uint64_t seed = random(), call = random();
      std::vector<std::uint64_t> numbers(count + 1, 77);
      kernels.numbers(seed, call, first, count, numbers.data());
      for (std::size_t i = 0; i < count; ++i) CHECK(numbers[i] == uniform_at(seed, call, first + i, 0));
      CHECK(numbers[count] == 77);
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
      for_lanes(seed, call, stratum_width(lanes), 0, lanes, [&](std::uint64_t lane, std::uint64_t x) {
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
      // Full: all leaves have the largest value, so that sixteen come closest to 2^32.
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
        end = ends[random() % capacity];  // a border between two leaves
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
          std::vector<std::uint64_t> ordered = targets;
          std::sort(ordered.begin(), ordered.end());
          for (const bool ascending : {false, true}) {
            const std::vector<std::uint64_t>& wanted = ascending ? ordered : targets;
            std::vector<std::uint64_t> used = wanted;
            tree->find(used.data(), used.size(), ascending ? wanted.size() : 0, found.data(), values.data());
            for (std::size_t i = 0; i < wanted.size(); ++i) {
              const auto expected = std::upper_bound(ends.begin(), ends.end(), wanted[i]) - ends.begin();
              CHECK(found[i] == expected);
              CHECK(values[i] == leaves[static_cast<std::size_t>(expected)]);
            }
          }
        }
      }
    }
  }
}

void sums_do_not_depend_on_how_leaves_came() {
  std::mt19937_64 random(9);
  for (const std::size_t capacity : {1, 16, 17, 300, 5000})
    for (const unsigned fanout : {2u, 16u, 64u}) {
      const auto tree = make_sum_tree(capacity, fanout);
      tree->watch_large(true);
      std::vector<std::uint32_t> leaves(capacity);
      for (int round = 0; round < 60; ++round) {
        const std::size_t first = random() % capacity;
        const std::size_t count = random() % std::min<std::size_t>(capacity - first + 1, round % 3 == 0 ? 5000 : 40);
        std::vector<std::uint32_t> values(count);
        for (auto& value : values) value = random() % 4 == 0 ? 0 : static_cast<std::uint32_t>(random() % kLeafMax) + 1;
        std::vector<std::int64_t> slots(count);
        for (auto& slot : slots) slot = static_cast<std::int64_t>(random() % capacity);
        if (round % 2 == 0) {
          tree->assign_range(first, values.data(), count);
          std::copy(values.begin(), values.end(), leaves.begin() + static_cast<std::ptrdiff_t>(first));
        } else {
          tree->assign(slots.data(), values.data(), count);
          for (std::size_t i = 0; i < count; ++i) leaves[static_cast<std::size_t>(slots[i])] = values[i];
        }
        CHECK(tree->total() == std::accumulate(leaves.begin(), leaves.end(), std::uint64_t{0}));
        CHECK(std::equal(leaves.begin(), leaves.end(), tree->leaves()));
        CHECK(tree->positive() == capacity - static_cast<std::size_t>(std::count(leaves.begin(), leaves.end(), 0u)));
        CHECK(tree->large() == sum_of_large(leaves.data(), capacity));
        std::uint64_t end = 0;
        for (std::size_t i = 0; i < capacity; ++i) {
          if (leaves[i] == 0) continue;
          std::uint64_t target = end;
          std::int64_t found;
          std::uint32_t value;
          tree->find(&target, 1, 0, &found, &value);
          CHECK(found == static_cast<std::int64_t>(i));
          end += leaves[i];
        }
      }
    }
}

void scans_see_every_priority(const ReplayKernels& kernels) {
  for (const std::size_t count : kCounts) {
    std::vector<float> priorities(count, 0.5f);
    for (std::size_t at = 0; at < count; at += 1 + count / 20) {
      for (const float wrong : {-1.0f, std::nanf(""), -std::nanf(""), -std::numeric_limits<float>::infinity()}) {
        priorities[at] = wrong;
        CHECK(!kernels.scan(priorities.data(), count).valid);
      }
      priorities[at] = std::numeric_limits<float>::infinity();
      CHECK(kernels.scan(priorities.data(), count).infinite == 1);
      priorities[at] = std::numeric_limits<float>::max();
      const PriorityScan found = kernels.scan(priorities.data(), count);
      CHECK(found.valid && found.infinite == 0 && found.largest == std::numeric_limits<float>::max());
      priorities[at] = -0.0f;
      CHECK(kernels.scan(priorities.data(), count).valid);
      priorities[at] = 0.5f;
      std::vector<std::int64_t> indices(count, 3);
      for (const std::int64_t outside : {std::int64_t{4}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(),
                                         std::numeric_limits<std::int64_t>::max()}) {
        indices[at] = outside;
        CHECK(!kernels.all_below(indices.data(), count, 4));
      }
      indices[at] = 0;
      CHECK(kernels.all_below(indices.data(), count, 4));
      CHECK(!kernels.all_below(indices.data(), count, 0));
    }
  }
  CHECK(kernels.all_below(nullptr, 0, 0));
}

}  // namespace

int main() {
  for (const std::string& name : replay_kernel_variants()) {
    select_replay_kernels(name);
    CHECK(replay_kernels().name == name);
    leaves_are_those_of_quantise(replay_kernels());
    weights_are_those_of_importance_weight(replay_kernels());
    numbers_are_those_of_philox(replay_kernels());
    targets_are_those_of_philox(replay_kernels());
    scans_see_every_priority(replay_kernels());
  }
  trees_of_every_fanout_find_the_same_leaves();
  sums_do_not_depend_on_how_leaves_came();
  CHECK(throws<ConfigurationError>([] { select_replay_kernels("sse9"); }));
}
