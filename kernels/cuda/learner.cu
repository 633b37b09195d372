// The Learner's kernels: a cluster of blocks, or one where there are no clusters, runs a tape on 16 transitions; another
// kernel moves the weights, a tile per block. The blocks of a cluster share the features of each layer, their warps a
// block's features and the terms of its sums. Weights, and values where they fit, are in the block's own memory.
#include "pearl/device/learner_operations.hpp"

namespace {

using pearl::device::kWarp;

constexpr int kMostThreads = 256;  // of a block
constexpr int kMostWarps = kMostThreads / static_cast<int>(kWarp);
constexpr int kQuads = kLanes / 4;  // a thread works on 4 transitions
constexpr int kParts = static_cast<int>(kWarp) / kQuads;
constexpr int kPatch = 4 * kParts;  // features that a warp computes at once, 4 for each thread

// Four floats that a thread loads and stores at once.
struct alignas(16) Four {
  float values[4];
};

PEARL_DEVICE const Four& four_at(const float* floats) { return *reinterpret_cast<const Four*>(floats); }
PEARL_DEVICE Four& four_at(float* floats) { return *reinterpret_cast<Four*>(floats); }

// Whether each row of a matrix consists of whole fours.
PEARL_DEVICE bool in_fours(const float* matrix, int width) {
  return width % 4 == 0 && reinterpret_cast<std::uintptr_t>(matrix) % sizeof(Four) == 0;
}

PEARL_DEVICE int least_of(int a, int b) { return a < b ? a : b; }

// Whether all values are in the block's memory while a tape runs.
PEARL_DEVICE bool holds_arena(const Context& c) { return c.block_features >= c.arena_features; }

// Sums of the warps, which the block adds up: of 16 transitions and a patch each.
struct alignas(16) WarpSums {
  float values[kMostWarps][kPatch * kLanes];
};
PEARL_DEVICE WarpSums& warp_sums() {
  PEARL_SHARED(WarpSums, sums);
  return sums;
}

// A thread's 4 transitions of each of 4 features.
struct FourSums {
  Four of[4];
};

// A thread's place in a block of whole warps.
struct WarpPlace {
  int warp, warps, at;

  PEARL_DEVICE explicit WarpPlace(int thread, int threads)
      : warp(thread / static_cast<int>(kWarp)),
        warps(threads / static_cast<int>(kWarp)),
        at(thread % static_cast<int>(kWarp)) {}
};

// A block's features of `width`.
struct Share {
  int begin, features;

  PEARL_DEVICE Share(const Lane& lane, int width) : begin(0), features(width) {
    if (lane.blocks == 1) return;
    const int share = pearl::device::share_of(width, lane.blocks);
    begin = least_of(width, share * lane.block);
    features = least_of(width - begin, share);
  }
};

// Where neighbouring threads read fours of different rows of a matrix in the block's memory, these lie in different
// banks: column c of a row, whose width is a multiple of 32, is at c ^ turn_of(row). The rows of a thread's four features
// have one turn.
PEARL_DEVICE int turn_of(int row, int width) { return row & (width % 32 == 0 ? 7 * 4 : 0); }

// Starts to copy an instruction's matrix to the block's memory. (Unused where only the movers of a rule are compiled.)
[[maybe_unused]] PEARL_DEVICE void start_load(const Lane& lane, const Instruction& i) {
  const Share share(lane, i.out_width);
  if (share.features <= 0) return;
  const bool forward = i.operation == Operation::linear;
  const int rows = forward ? share.features : i.in_width, width = forward ? i.in_width : share.features;
  const int pitch = forward ? i.in_width : i.out_width;
  const float* const parameters = lane.context.parameters[i.parameters];
  const std::int64_t begin = forward ? static_cast<std::int64_t>(share.begin) * pitch : share.begin;
  const float* const from = parameters + i.weight + begin;
  float* const to = pearl::device::block_memory() + i.held;
  // Threads take fours in turn, without a division for each.
  const int fours = width / 4, row_step = lane.threads / fours;
  const int step = lane.threads - row_step * fours;
  int row = lane.thread / fours, four = lane.thread - row * fours;
  while (row < rows) {
    pearl::device::start_copy<16>(to + row * width + (four * 4 ^ turn_of(row, width)),
                                  from + static_cast<std::int64_t>(row) * pitch + four * 4);
    row += row_step;
    four += step;
    if (four >= fours) {
      four -= fours;
      ++row;
    }
  }
  if (forward && i.bias != kNone)
    for (int n = lane.thread; n < rows; n += lane.threads)
      pearl::device::start_copy<4>(to + rows * width + n, parameters + i.bias + share.begin + n);
}

// Computes the block's `features` of the 16 transitions, each a sum of `depth` terms: compute(first, from, to, quad, sums)
// adds terms [from, to) of 4 features and transitions; finish(feature, quad, sums) gets the sums of one. `compute` may be
// given features beyond the last, whose sums nobody uses.
template <class Compute, class Finish>
PEARL_DEVICE void for_features(const Lane& lane, int features, int depth, Compute compute, Finish finish) {
  WarpSums& partial = warp_sums();
  constexpr int kLeastDepth = 8;  // of a part of a sum
  const WarpPlace place(lane.thread, lane.threads);
  const int quad = place.at % kQuads, part = place.at / kQuads;
  if (features <= 0) return;
  const bool narrow = features <= 4;  // then the threads of a warp share the terms too
  const int patches = (features + kPatch - 1) / kPatch, splitters = narrow ? kParts : 1;
  if (patches >= place.warps && !narrow) {
    for (int patch = place.warp; patch < patches; patch += place.warps) {
      const int first = patch * kPatch + part * 4;
      FourSums sums{};
      compute(first, 0, depth, quad, sums);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first + j < features) finish(first + j, quad, sums.of[j]);
    }
    return;
  }
  const int most = place.warps / patches * splitters;  // parts of a sum
  const int terms = narrow ? (depth + 4 * most - 1) / (4 * most) * 4
                           : ((depth + most - 1) / most + kLeastDepth - 1) / kLeastDepth * kLeastDepth;
  const int patch = place.warp % patches, group = place.warp / patches;
  const int from = (narrow ? group * kParts + part : group) * terms;
  const int used = least_of(place.warps / patches, (depth + terms * splitters - 1) / (terms * splitters));  // warps of a patch
  if (group < used) {
    FourSums sums{};
    if (from < depth)
      compute(narrow ? 0 : patch * kPatch + part * 4, from, least_of(depth, from + terms), quad, sums);
    if (narrow) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
          for (int step = kQuads; step < static_cast<int>(kWarp); step *= 2)
            sums.of[j].values[t] += __shfl_xor_sync(~0u, sums.of[j].values[t], step, kWarp);
    }
    if (!narrow || part == 0)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        four_at(partial.values[group * patches + patch] + ((narrow ? 0 : part * 4) + j) * kLanes + quad * 4) = sums.of[j];
  }
  __syncthreads();
  for (int item = lane.thread; item < features * kQuads; item += lane.threads) {
    const int feature = item / kQuads, four = item % kQuads;
    Four total{};
    for (int g = 0; g < used; ++g) {
      const Four other = four_at(partial.values[g * patches + feature / kPatch] + feature % kPatch * kLanes + four * 4);
#pragma unroll
      for (int t = 0; t < 4; ++t) total.values[t] += other.values[t];
    }
    finish(feature, four, total);
  }
}

// The input of an operation on a matrix, if it is in the block's memory: copied there, or with all values.
PEARL_DEVICE const float* held_input(const Lane& lane, const Instruction& i) {
  return pearl::device::block_memory() + (holds_arena(lane.context) ? static_cast<std::int64_t>(i.in) * kLanes : 0);
}

// `is_held`: weights and input are in the block's memory, as the compiler then knows.
template <bool is_held>
PEARL_DEVICE void linear_of(const Lane& lane, const Instruction& i) {
  const Share share(lane, i.out_width);
  const float* const parameters = lane.context.parameters[i.parameters];
  const float* const weight = is_held ? pearl::device::block_memory() + i.held
                                      : parameters + i.weight + static_cast<std::int64_t>(share.begin) * i.in_width;
  const float* const bias = i.bias == kNone ? nullptr
                            : is_held       ? weight + share.features * i.in_width
                                            : parameters + i.bias + share.begin;
  const bool fours = is_held || in_fours(weight, i.in_width);
  const float* const inputs = is_held ? held_input(lane, i) : lane.of_all(i.in);
  const auto compute = [&](int first, int from, int to, int quad, FourSums& sums) {
    const float* rows[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      rows[j] = weight + static_cast<std::int64_t>(least_of(first + j, share.features - 1)) * i.in_width;
    const int turn = is_held ? turn_of(first, i.in_width) : 0;
    const float* const x = inputs + quad * 4;
    int k = from;
    if (fours) {
#pragma unroll 2
      for (; k < to; k += 4) {  // `to` is a multiple of 4 too
        Four values[4], weights[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) values[m] = four_at(x + (k + m) * kLanes);
#pragma unroll
        for (int j = 0; j < 4; ++j) weights[j] = four_at(rows[j] + (k ^ turn));
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int t = 0; t < 4; ++t)
              sums.of[j].values[t] = math::fma(weights[j].values[m], values[m].values[t], sums.of[j].values[t]);
      }
    }
    if constexpr (!is_held) {
      for (; k < to; ++k) {
        const Four value = four_at(x + k * kLanes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float w = rows[j][k];
#pragma unroll
          for (int t = 0; t < 4; ++t) sums.of[j].values[t] = math::fma(w, value.values[t], sums.of[j].values[t]);
        }
      }
    }
  };
  float* const outputs = lane.of_all(i.out) + share.begin * kLanes;
  for_features(lane, share.features, i.in_width, compute, [&](int feature, int quad, Four sums) {
    const float start = bias != nullptr ? bias[feature] : 0.0f;
#pragma unroll
    for (int t = 0; t < 4; ++t) sums.values[t] = activated(sums.values[t] + start, i.activation);
    four_at(outputs + feature * kLanes + quad * 4) = sums;
  });
}

template <bool is_held>
PEARL_DEVICE void slope_linear_of(const Lane& lane, const Instruction& i) {
  const Share share(lane, i.out_width);
  const float* const weight = is_held ? pearl::device::block_memory() + i.held
                                      : lane.context.parameters[i.parameters] + i.weight + share.begin;
  const int pitch = is_held ? share.features : i.out_width;
  const float* const slopes = is_held ? held_input(lane, i) : lane.of_all(i.in);
  const auto compute = [&](int first, int from, int to, int quad, FourSums& sums) {
    const float* const dy = slopes + quad * 4;
    if constexpr (!is_held) {
      if (!in_fours(weight, i.out_width)) {
#pragma unroll 2
        for (int n = from; n < to; ++n) {
          const Four slope = four_at(dy + n * kLanes);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float w = weight[static_cast<std::int64_t>(n) * pitch + least_of(first + j, share.features - 1)];
#pragma unroll
            for (int t = 0; t < 4; ++t) sums.of[j].values[t] = math::fma(w, slope.values[t], sums.of[j].values[t]);
          }
        }
        return;
      }
    }
    const int column = least_of(first, share.features - 4);
#pragma unroll 4
    for (int n = from; n < to; ++n) {
      const int turn = is_held ? turn_of(n, pitch) : 0;
      const Four slope = four_at(dy + n * kLanes);
      const Four weights = four_at(weight + static_cast<std::int64_t>(n) * pitch + (column ^ turn));
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int t = 0; t < 4; ++t)
          sums.of[j].values[t] = math::fma(weights.values[j], slope.values[t], sums.of[j].values[t]);
    }
  };
  const bool adds = (i.flags & kAccumulate) != 0, derives = i.activation != Activation::none;
  float* const out = lane.of_all(i.out) + share.begin * kLanes;
  const float* const results = derives ? lane.of_all(i.other) + share.begin * kLanes : nullptr;
  for_features(lane, share.features, i.in_width, compute, [&](int feature, int quad, Four sums) {
    const int at = feature * kLanes + quad * 4;
    if (adds) {
      const Four before = four_at(out + at);
#pragma unroll
      for (int t = 0; t < 4; ++t) sums.values[t] += before.values[t];
    }
    if (derives) {
      const Four there = four_at(results + at);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float y = there.values[t];
        float& slope = sums.values[t];
        slope = i.activation == Activation::relu ? (y > 0.0f ? slope : 0.0f) : slope * (1.0f - y * y);
      }
    }
    four_at(out + at) = sums;
  });
}

PEARL_DEVICE void linear(const Lane& lane, const Instruction& i) {
  i.held != kNone ? linear_of<true>(lane, i) : linear_of<false>(lane, i);
}

PEARL_DEVICE void slope_linear(const Lane& lane, const Instruction& i) {
  i.held != kNone ? slope_linear_of<true>(lane, i) : slope_linear_of<false>(lane, i);
}

PEARL_DEVICE void send(const Lane& lane, const Instruction& i) {
  const std::int64_t begin = static_cast<std::int64_t>(i.in) * kLanes;
  const float* const from = pearl::device::block_memory() + begin;
  float* const to = pearl::device::block_memory_of(static_cast<unsigned>(i.column)) + begin;
  for (int four = lane.thread; four < i.in_width * kQuads; four += lane.threads)
    four_at(to + four * 4) = four_at(from + four * 4);
}

// Instructions whose loads were started, and how many loads these are.
struct Started {
  int instructions = 0, loads = 0;
};

// Between two instructions: starts the loads of those ahead, and waits for what this one reads in the block's memory.
template <class InstructionAt>
PEARL_DEVICE void bring(const Lane& lane, const Instruction& i, InstructionAt instruction_at, Started& started) {
  constexpr int kKept = 4;
  const bool reads = i.held != kNone, copies = reads && !holds_arena(lane.context);
  const float* const input = lane.of_all(i.in);
  float* const there = pearl::device::block_memory();
  // The input's first fours are on their way while loads are started.
  Four kept[kKept];
#pragma unroll
  for (int u = 0; u < kKept; ++u) {
    const int four = u * lane.threads + lane.thread;
    if (copies && four < i.in_width * kQuads) kept[u] = four_at(input + four * 4);
  }
  for (; started.instructions < i.ahead; ++started.instructions) {
    const Instruction ahead = instruction_at(started.instructions);
    if ((ahead.flags & kLoads) != 0) {
      start_load(lane, ahead);
      pearl::device::end_copies();
      ++started.loads;
    }
  }
#pragma unroll
  for (int u = 0; u < kKept; ++u) {
    const int four = u * lane.threads + lane.thread;
    if (copies && four < i.in_width * kQuads) four_at(there + four * 4) = kept[u];
  }
  if (copies)
    for (int four = kKept * lane.threads + lane.thread; four < i.in_width * kQuads; four += lane.threads)
      four_at(there + four * 4) = four_at(input + four * 4);
  if (reads) {
    pearl::device::wait_for_copies(started.loads - i.loads);  // they arrive in order
    __syncthreads();
  }
}

// A block that moves a tile.
struct TileBlock {
  const Place& place;
  int thread, threads;

  PEARL_DEVICE explicit TileBlock(const Place& here)
      : place(here),
        thread(static_cast<int>(here.row * here.lanes + here.lane)),
        threads(static_cast<int>(here.rows * here.lanes)) {}
};

// Calls visit(place in the vector, gradient) for this thread's part of a tile. In a vector, 16 threads share the
// transitions of an entry. In a matrix, warps do: each has all sums of the tile, 4 x 4 for a thread.
template <class Visit>
PEARL_DEVICE void for_gradients(const Context& c, const Tile& tile, const TileBlock& block, Visit visit) {
  const std::int64_t group_floats = c.arena_features * kLanes;
  const float* const slopes = c.arena + static_cast<std::int64_t>(tile.slopes) * kLanes;
  if (tile.in == 0) {
    const int at = block.thread % kLanes;
    for (int base = 0; base < tile.count; base += block.threads / kLanes) {
      const int n = base + block.thread / kLanes;
      const float* slope = slopes + least_of(n, tile.count - 1) * kLanes + at;
      float sum = 0.0f;
#pragma unroll 4
      for (int g = 0; g < c.groups; ++g, slope += group_floats) sum += *slope;
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step, kLanes);
      if (at == 0 && n < tile.count) visit(tile.weight + tile.first + n, sum);
    }
    return;
  }
  WarpSums& partial = warp_sums();
  constexpr int kColumns = 32;
  const WarpPlace place(block.thread, block.threads);
  // A thread's rows are 4 apart and its columns 8, so that neighbours read neighbours.
  const int row = place.at / 8, column = place.at % 8;
  const float* const inputs = c.arena + tile.rows * kLanes;
  const bool by_group = c.groups >= place.warps;  // then a warp reads all transitions of a group, which lie together
  const int quads = c.groups * kQuads;
  for (int begin = tile.begin; begin < tile.end; begin += kColumns) {
    const float *dy[4], *x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      dy[j] = slopes + least_of(row + 4 * j, tile.count - 1) * kLanes;
      x[j] = inputs + static_cast<std::int64_t>(least_of(begin + column + 8 * j, tile.in - 1)) * kLanes;
    }
    FourSums sums{};
#pragma unroll 2
    for (int step = 0;; ++step) {
      const int q = by_group ? (step / kQuads * place.warps + place.warp) * kQuads + step % kQuads
                             : step * place.warps + place.warp;
      if (q >= quads) break;
      const std::int64_t at = q / kQuads * group_floats + q % kQuads * 4;
      Four slope[4], value[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) slope[j] = four_at(dy[j] + at);
#pragma unroll
      for (int m = 0; m < 4; ++m) value[m] = four_at(x[m] + at);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int t = 0; t < 4; ++t)
            sums.of[j].values[m] = math::fma(slope[j].values[t], value[m].values[t], sums.of[j].values[m]);
    }
    if (begin > tile.begin) __syncthreads();  // the sums of the columns before may still be read
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int m = 0; m < 4; ++m)
        partial.values[place.warp][(row + 4 * j) * kColumns + column + 8 * m] = sums.of[j].values[m];
    __syncthreads();
    for (int item = block.thread; item < kTileRowsOfThreads * kColumns; item += block.threads) {
      const int n = item / kColumns, k = begin + item % kColumns;
      float total = 0.0f;
      for (int w = 0; w < place.warps; ++w) total += partial.values[w][item];
      if (n < tile.count && k < tile.end)
        visit(tile.weight + static_cast<std::int64_t>(tile.first + n) * tile.in + k, total);
    }
  }
}

// The same for stored gradients.
template <class Visit>
PEARL_DEVICE void for_kept_gradients(const Tile& tile, const TileBlock& block, const float* gradients, Visit visit) {
  if (tile.in == 0) {
    for (int n = block.thread; n < tile.count; n += block.threads)
      visit(tile.weight + tile.first + n, gradients[tile.weight + tile.first + n]);
    return;
  }
  const WarpPlace place(block.thread, block.threads);
  for (int n = place.warp; n < tile.count; n += place.warps)
    for (int k = tile.begin + place.at; k < tile.end; k += static_cast<int>(kWarp)) {
      const std::int64_t at = tile.weight + static_cast<std::int64_t>(tile.first + n) * tile.in + k;
      visit(at, gradients[at]);
    }
}

template <class Visit>
PEARL_DEVICE void move_tile(const Context& c, const Tile& tile, const TileBlock& block, int policy, const Visit& move) {
  if (c.max_grad_norm > 0.0f)
    for_kept_gradients(tile, block, c.gradients[policy], move);
  else
    for_gradients(c, tile, block, move);
}

// The sum over all work-groups' sums of one kind, `float Sums::* which`; the block's threads share it. Not a number if one
// of them gives `failed`.
PEARL_DEVICE float total_of(const Context& c, const TileBlock& block, float Sums::* which, bool failed = false) {
  constexpr std::uint32_t kNotANumber = 0x7FC00000;
  float total = failed ? std::bit_cast<float>(kNotANumber) : 0.0f;
  for (int g = block.thread; g < c.groups; g += block.threads) total += c.sums[g].*which;
  return sum(block.place, total);
}

// Records a failure and returns false where the loss is not finite.
PEARL_DEVICE bool healthy(const Context& c, float loss) {
  Outcome& outcome = *c.outcome;
  if (!no_failure_pending(outcome)) return false;
  if (finite(loss)) return true;
  note_failure(outcome, kDiverged);
  return false;
}

// Data that a block reads all the time. Arrays of words, since memory that blocks share is not initialised.
constexpr int kHeldInstructions = 64;
struct HeldTape {
  alignas(16) std::uint32_t context[sizeof(Context) / 4];
  alignas(16) std::uint32_t instructions[kHeldInstructions * sizeof(Instruction) / 4];
};

[[maybe_unused]] PEARL_DEVICE void copy_words(const void* from, std::uint32_t* to, int count, const TileBlock& block) {
  for (int word = block.thread; word < count; word += block.threads) to[word] = static_cast<const std::uint32_t*>(from)[word];
}

}  // namespace

#define PEARL_LEARNER_KERNEL PEARL_KERNEL_OF(kMostThreads)

#if PEARL_HAS_TAPE

PEARL_LEARNER_KERNEL pearl_run_tape(const Context* context, const Instruction* tape, int count, const StepNumbers* numbers) {
  PEARL_SHARED(HeldTape, held);
  const Place place = pearl::device::place_in_cluster();
  const TileBlock block(place);
  copy_words(context, held.context, sizeof(Context) / 4, block);
  copy_words(tape, held.instructions, least_of(count, kHeldInstructions) * static_cast<int>(sizeof(Instruction) / 4), block);
  const std::uint64_t step = numbers->step;
  const bool failed = context->outcome->failure != 0;
  __syncthreads();
  if (failed) return;
  const Context& c = *reinterpret_cast<const Context*>(held.context);
  const auto* const instructions = reinterpret_cast<const Instruction*>(held.instructions);
  const int group = static_cast<int>(place.group), lane_index = static_cast<int>(place.lane);
  const int rows = static_cast<int>(place.rows), rank = static_cast<int>(pearl::device::cluster_rank());
  // Each block either computes a part of every instruction's features, or runs a tape of its own.
  const bool branches = c.branches > 1;
  const int blocks = branches ? 1 : static_cast<int>(pearl::device::cluster_size()),
            block_of_tape = branches ? 0 : rank;
  const int length = branches ? count / c.branches : count, first = branches ? rank * length : 0;
  if (branches) pearl::device::cluster_barrier();  // all blocks run: others may write to their memory
  float* const kept = c.arena + c.arena_features * kLanes * group;
  float* const arena = holds_arena(c) ? pearl::device::block_memory() : kept;
  const Lane lane{c,
                  arena + lane_index,
                  lane_index,
                  static_cast<std::int64_t>(group) * kLanes + lane_index,
                  block_of_tape * rows + static_cast<int>(place.row),
                  blocks * rows,
                  block.thread,
                  block.threads,
                  block_of_tape,
                  blocks};
  Sums scored{};
  Started started;
  const auto instruction_at = [&](int index) {
    return first + index < kHeldInstructions ? instructions[first + index] : tape[first + index];
  };
  for (int index = 0; index < length; ++index) {
    // In registers: after stores to the arena it would be loaded again.
    const Instruction i = instruction_at(index);
    bring(lane, i, instruction_at, started);
    // Nothing may leave the loop's body before a barrier: the halves of a warp would come to it one after another.
    run_instruction(lane, i, step, scored);
    __syncwarp();  // so that whole warps come to one of the barriers
    if (branches && (i.flags & kJoins) == 0)
      __syncthreads();
    else
      pearl::device::cluster_barrier();
    if ((i.flags & kEnds) != 0) break;
  }
  if (holds_arena(c) && rank == 0) {  // for the kernels that move the weights
    const int fours = static_cast<int>(c.arena_features) * kQuads;
#pragma unroll 4
    for (int four = block.thread; four < fours; four += block.threads)
      four_at(kept + four * 4) = four_at(arena + four * 4);
  }
  const float loss = sum(place, scored.loss), td_error = sum(place, scored.td_error);
  const float policy = sum(place, scored.policy_loss), gap = sum(place, scored.entropy_gap);
  if (rank == 0 && block.thread == 0) c.sums[group] = {loss, td_error, policy, gap};
}

// With clipping: stores the gradients of all tiles, and the sums of their squares.
PEARL_LEARNER_KERNEL pearl_gradients(const Context* context, const Tile* tiles, int policy) {
  const Place place = place_here();
  const TileBlock block(place);
  const Context& c = *context;
  const Tile tile = tiles[place.group];
  if (c.outcome->failure != 0) return;
  float squares = 0.0f;
  float* const gradients = c.gradients[policy];
  for_gradients(c, tile, block, [&](std::int64_t at, float gradient) {
    gradients[at] = gradient;
    squares += gradient * gradient;
  });
  squares = sum(place, squares);
  if (block.thread == 0) c.squares[place.group] = squares;
}

#endif  // PEARL_HAS_TAPE

// Moves the weights of all tiles: by their slopes or, with clipping, by the stored gradients.
PEARL_LEARNER_KERNEL pearl_move_weights(const Context* context, const Tile* tiles, int count, const Optimizer* optimizer,
                                        const StepNumbers* numbers, int policy) {
  const Place place = place_here();
  const TileBlock block(place);
  const Context& c = *context;
  const Tile tile = tiles[place.group];
  const StepArguments step = numbers->moves[policy];
  Outcome& outcome = *c.outcome;
  // Another block may note a failure meanwhile: all threads of this one must agree on it.
  const bool failed = Atomic<std::int32_t>(outcome.failure).load() != 0;
  const float loss = total_of(c, block, policy ? &Sums::policy_loss : &Sums::loss, failed);
  if (!healthy(c, loss)) return;
  float factor = 1.0f, norm = 0.0f;
  if (c.max_grad_norm > 0.0f) {
    for (int t = block.thread; t < count; t += block.threads) norm += c.squares[t];
    norm = math::sqrt(sum(place, norm));
    if (!finite(norm)) {
      note_failure(outcome, kDiverged);
      return;
    }
    factor = math::fmin(1.0f, c.max_grad_norm / (norm + 1e-6f));
  }
  const int vector = policy ? kActor : kOnline;
  float* const targets = c.parameters[vector + 1];
  if (targets != nullptr && step.target > 0.0f)
    move_tile(c, tile, block, policy, Mover<true>{*optimizer, c.parameters[vector], targets, step, factor});
  else
    move_tile(c, tile, block, policy, Mover<false>{*optimizer, c.parameters[vector], nullptr, step, factor});
  if (place.group != 0) return;
  const float td_error = total_of(c, block, &Sums::td_error);
  if (block.thread == 0) note_step(c, policy != 0, loss, td_error, norm);
}

// SAC: moves the temperature by the entropy of the batch, after the policy, which notes a loss that is not finite.
PEARL_LEARNER_KERNEL pearl_move_temperature(const Context* context, const Optimizer* optimizer, const StepNumbers* numbers) {
  const Place place = place_here();
  const TileBlock block(place);
  const Context& c = *context;
  if (c.outcome->failure != 0) return;
  const float gap = total_of(c, block, &Sums::entropy_gap);
  if (block.thread != 0) return;
  const Mover<false> move{*optimizer, c.log_alpha, nullptr, numbers->moves[2], 1.0f};
  move(0, -gap / static_cast<float>(c.batch));
}
