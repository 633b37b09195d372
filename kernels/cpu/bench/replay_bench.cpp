// Nanoseconds per item of each stage of the Replay Manager, for every variant of the kernels that the machine has.
// Compares them with a floor: the time to touch just the cache lines that a sampled or updated item needs, with
// prefetching and one after the other; the ratio tells how many lines were in flight.
//
//   replay_bench [--fanout=K] [slots ...]        (default: 4 to 128; 100000 1000000 10000000)
//
// Each figure is the median of rounds that alternate between the variants, so that other load affects all alike.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/quantise.hpp"
#include "pearl/replay_kernels.hpp"
#include "pearl/sum_tree.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace {

using namespace pearl;

constexpr int kRounds = 9;
constexpr std::size_t kBatch = 2048;
constexpr std::size_t kItems = 1 << 15;  // per round and stage

template <class Work>
double ns_per_item(std::size_t items, Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(items);
}

double median(std::vector<double> samples) {
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

// The lines that one item needs: a leaf, its parent (updates), its slot of 8 bytes and its count of 2 (samples).
struct Floor {
  double together;    // ns per item, many lines in flight
  double one_by_one;  // each address depends on the line before
};

Floor floor_of(std::size_t slots, bool update) {
  AlignedArray<std::uint32_t> leaves(slots);
  AlignedArray<std::uint64_t> items(slots), parents(slots / 16 + 1);
  AlignedArray<std::uint16_t> times(slots);
  for (std::size_t i = 0; i < slots; ++i) {
    leaves[i] = 1;
    items[i] = times[i] = 1;
    parents[i / 16] = 1;
  }
  std::mt19937_64 random(4);
  std::vector<std::size_t> order(kItems);
  std::vector<double> together, one_by_one;
  std::uint64_t sum = 0;
  constexpr std::size_t kAhead = 64;
  for (int round = 0; round < 2 * kRounds; ++round) {
    for (auto& slot : order) slot = random() % slots;
    for (std::size_t at = 0; at < kItems; at += kBatch)
      if (!update) std::sort(order.begin() + at, order.begin() + at + kBatch);  // as sampling returns them
    const bool dependent = round % 2 == 1;
    (dependent ? one_by_one : together).push_back(ns_per_item(kItems, [&] {
      std::size_t zero = 0;  // always 0, but depends on the lines loaded
      for (std::size_t i = 0; i < kItems; ++i) {
        if (!dependent && i + kAhead < kItems) {
          const std::size_t ahead = order[i + kAhead];
          __builtin_prefetch(&leaves[ahead], 1, 3);
          __builtin_prefetch(&items[ahead], 1, 3);
          if (update)
            __builtin_prefetch(&parents[ahead / 16], 1, 3);
          else
            __builtin_prefetch(&times[ahead], 1, 3);
        }
        const std::size_t at = order[i] + zero;
        const std::uint32_t leaf = leaves[at];
        const std::uint64_t item = items[at + (dependent ? leaf & 0x80000000u : 0)];
        sum += leaf + item;
        std::uint64_t last = item;
        if (update) {
          leaves[at] = leaf ^ 2;
          items[at] = item ^ 2;
          last = parents[(at + (dependent ? item & 0x80000000u : 0)) / 16] ^= 2;
        } else {
          last = times[at + (dependent ? item & 0x80000000u : 0)] ^= 2;
        }
        if (dependent) zero = last & 0x80000000u;
      }
    }));
  }
  volatile std::uint64_t sink = sum;
  (void)sink;
  return {median(together), median(one_by_one)};
}

struct Stages {
  std::vector<double> targets, find, weights, quantise, assign, sample, update;
};

void measure(std::size_t slots, unsigned fanout) {
  std::mt19937_64 random(2);
  std::vector<float> priorities(slots);
  for (auto& priority : priorities) priority = static_cast<float>(random() % 100000 + 1) * 1e-4f;
  std::vector<std::int64_t> all(slots);
  std::iota(all.begin(), all.end(), 0);
  SumTreeReplay replay(static_cast<std::int64_t>(slots), fanout, 0.6, 3);
  replay.insert(all.data(), priorities.data(), slots);
  const auto tree = make_sum_tree(slots, fanout);
  std::vector<std::uint32_t> leaves(slots);
  replay_kernels().quantise(priorities.data(), slots, exponent_q28(0.6), kDefaultScale, leaves.data());
  tree->assign(all.data(), leaves.data(), slots);

  std::vector<std::uint64_t> targets(kBatch);
  std::vector<std::int64_t> indices(kBatch);
  std::vector<std::uint32_t> values(kBatch), generations(kBatch);
  std::vector<float> weights(kBatch), fresh(kBatch);
  for (auto& priority : fresh) priority = static_cast<float>(random() % 100000 + 1) * 1e-4f;
  const std::vector<std::string> variants = replay_kernel_variants();
  std::vector<Stages> stages(variants.size());
  std::uint64_t call = 0;
  const auto repeated = [](auto work) {
    return ns_per_item(kItems, [&] {
      for (std::size_t done = 0; done < kItems; done += kBatch) work();
    });
  };
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t v = 0; v < variants.size(); ++v) {
      select_replay_kernels(variants[v]);
      const ReplayKernels& kernels = replay_kernels();
      Stages& out = stages[v];
      const auto draw = [&] { kernels.targets(3, ++call, kBatch, 0, kBatch, tree->total(), targets.data()); };
      out.targets.push_back(repeated(draw));
      const double drawn = out.targets.back();
      out.find.push_back(repeated([&] {
                           draw();
                           tree->find(targets.data(), kBatch, kBatch, indices.data(), values.data());
                         }) - drawn);
      out.weights.push_back(repeated([&] {
        const std::uint32_t smallest = kernels.smallest(values.data(), kBatch);
        kernels.weights(values.data(), kBatch, smallest, exponent_q28(0.4), weights.data());
      }));
      out.quantise.push_back(repeated([&] {
        kernels.quantise(fresh.data(), kBatch, exponent_q28(0.6), kDefaultScale, values.data());
      }));
      std::vector<std::int64_t> slots_of_round(kItems);
      for (auto& slot : slots_of_round) slot = static_cast<std::int64_t>(random() % slots);
      for (std::size_t at = 0; at < kItems; at += kBatch)
        std::sort(slots_of_round.begin() + at, slots_of_round.begin() + at + kBatch);  // as sampling returns them
      const std::int64_t* next = slots_of_round.data();
      out.assign.push_back(repeated([&] {
        tree->assign(next, values.data(), kBatch);
        next += kBatch;
      }));
      out.sample.push_back(repeated([&] {
        replay.sample(kBatch, 0.4, indices.data(), weights.data(), generations.data());
      }));
      next = slots_of_round.data();
      out.update.push_back(repeated([&] {
        replay.update(next, fresh.data(), nullptr, kBatch);
        next += kBatch;
      }));
    }
  }
  for (std::size_t v = 0; v < variants.size(); ++v) {
    const Stages& s = stages[v];
    std::printf("%10zu %4u %-7s %8.2f %8.2f %8.2f %8.2f %8.2f %8.2f %8.2f\n", slots, fanout, variants[v].c_str(),
                median(s.targets), median(s.find), median(s.weights), median(s.quantise), median(s.assign),
                median(s.sample), median(s.update));
  }
  select_replay_kernels(variants.back());
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::size_t> sizes;
  unsigned least = 4;
  unsigned most = 128;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument.rfind("--fanout=", 0) == 0)
      least = most = static_cast<unsigned>(std::stoul(argument.substr(9)));
    else
      sizes.push_back(std::stoull(argument));
  }
  if (sizes.empty()) sizes = {100000, 1000000, 10000000};
  std::printf("Nanoseconds per item, batches of %zu, median of %d rounds of %zu items\n", kBatch, kRounds, kItems);
  std::printf("%10s %4s %-7s %8s %8s %8s %8s %8s %8s %8s\n", "slots", "K", "kernels", "targets", "find", "weights",
              "quantise", "assign", "sample", "update");
  for (const std::size_t slots : sizes) {
    for (unsigned fanout = least; fanout <= most; fanout *= 2) measure(slots, fanout);
    for (const bool update : {false, true}) {
      const Floor floor = floor_of(slots, update);
      std::printf("%10zu floor %-7s %8.2f with %.1f lines under way, %.2f one after the other\n", slots,
                  update ? "update" : "sample", floor.together, floor.one_by_one / floor.together, floor.one_by_one);
    }
  }
}
