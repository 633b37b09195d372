// The hot loops of the Replay Manager for several instruction sets, chosen once at run time. Every variant gives the
// bits of the plain one, which is C++ for any machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pearl {

// A sum tree's arrays (sum_tree.hpp), read-only.
struct TreeLevels {
  const std::uint32_t* leaves;
  const std::uint64_t* const* sums;  // sums[0] are the parents of leaves
  std::size_t count;                 // levels of sums; the last has one node
};

// Properties of a batch of priorities.
struct PriorityScan {
  bool valid;            // none is NaN or negative
  float largest;         // of the finite ones, at least 0; of valid batches alone
  std::size_t infinite;  // likewise
};

struct ReplayKernels {
  // Descends from `places`, nodes of sums[level] that hold the targets, to leaves and their values. `rest` is each
  // target minus the sum before its node; it is overwritten.
  using Find = void (*)(const TreeLevels& tree, std::size_t level, std::uint64_t* rest, std::size_t count,
                        std::int64_t* places, std::uint32_t* values);

  const char* name;
  // Leaves of priorities that are neither NaN nor negative: quantise() of each.
  void (*quantise)(const float* priorities, std::size_t count, std::int64_t alpha_q28, int scale,
                   std::uint32_t* leaves);
  // The least of the leaves; 2^32 - 1 for none.
  std::uint32_t (*smallest)(const std::uint32_t* leaves, std::size_t count);
  // (smallest / leaf)^beta for leaves of at least `smallest`, which is at least 1: importance_weight() of each.
  void (*weights)(const std::uint32_t* leaves, std::size_t count, std::uint32_t smallest, std::int64_t beta_q28,
                  float* weights);
  // uniform_at(seed, call, lane, 0) (philox.hpp) of lanes first..first+count-1; `first` is even.
  void (*numbers)(std::uint64_t seed, std::uint64_t call, std::uint64_t first, std::size_t count,
                  std::uint64_t* numbers);
  // floor(total * x_k / 2^64), x_k the stratified number of lane k, for lanes first..first+count-1 of
  // `lanes`; `first` is even.
  void (*targets)(std::uint64_t seed, std::uint64_t call, std::uint64_t lanes, std::uint64_t first, std::size_t count,
                  std::uint64_t total, std::uint64_t* targets);
  PriorityScan (*scan)(const float* priorities, std::size_t count);
  // Whether all lie in [0, end), end at most 2^63.
  bool (*all_below)(const std::int64_t* indices, std::size_t count, std::size_t end);
  Find find[9];  // by log2(fanout), from 1
};

// The table in use: the variant that PEARL_ISA (plain, avx2, avx512) names, else the fastest that this machine has.
// Throws ConfigurationError if this machine lacks the one that PEARL_ISA names.
const ReplayKernels& replay_kernels();
// Names of the variants that this machine has, plainest first.
std::vector<std::string> replay_kernel_variants();
// Switches every replay of this process; safe at any time, since all variants give the same bits. Throws
// ConfigurationError for a name that is not among the variants.
void select_replay_kernels(const std::string& name);

const ReplayKernels& plain_replay_kernels();
// x86-64 only; null if this machine lacks the instruction set.
const ReplayKernels* avx2_replay_kernels();
const ReplayKernels* avx512_replay_kernels();

}  // namespace pearl
