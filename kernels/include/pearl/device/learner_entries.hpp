// The Learner's kernels where lanes are parts of a vector: one runs a tape on 16 transitions per work-group; another moves
// the weights, a tile per work-group. With PEARL_SLICED, the rows of a work-group share the neurons of each layer, and the
// columns of a tile.
#pragma once

#include "pearl/device/learner_operations.hpp"

namespace {

template <int Count>
PEARL_DEVICE void linear_tile(const Lane& lane, const Instruction& i, const float* weight, const float* bias,
                              int first) {
  float sums[Count];
#pragma unroll
  for (int j = 0; j < Count; ++j) sums[j] = bias != nullptr ? bias[first + j] : 0.0f;
  const float* x = lane.at(i.in);
  const float* w = weight + static_cast<std::int64_t>(first) * i.in_width;
  for (int k = 0; k < i.in_width; ++k) {
    const float value = x[k * kLanes];
#pragma unroll
    for (int j = 0; j < Count; ++j) sums[j] = math::fma(w[j * i.in_width + k], value, sums[j]);
  }
  float* y = lane.at(i.out + first);
#pragma unroll
  for (int j = 0; j < Count; ++j) y[j * kLanes] = activated(sums[j], i.activation);
}

template <int Count>
PEARL_DEVICE void slope_tile(const Lane& lane, const Instruction& i, const float* weight, int first) {
  float sums[Count];
#pragma unroll
  for (int j = 0; j < Count; ++j) sums[j] = 0.0f;
  const float* dy = lane.at(i.in);
  const float* w = weight + first;
  for (int n = 0; n < i.in_width; ++n) {
    const float slope = dy[n * kLanes];
#pragma unroll
    for (int j = 0; j < Count; ++j) {
      const float w_nj = w[static_cast<std::int64_t>(n) * i.out_width + j];
      sums[j] = math::fma(w_nj, slope, sums[j]);
    }
  }
  float* dx = lane.at(i.out + first);
  const bool adds = (i.flags & kAccumulate) != 0;
#pragma unroll
  for (int j = 0; j < Count; ++j) {
    float slope = sums[j];
    if (adds) slope += dx[j * kLanes];
    if (i.activation != Activation::none) {
      const float y = lane.at(i.other + first)[j * kLanes];
      slope = i.activation == Activation::relu ? (y > 0.0f ? slope : 0.0f) : slope * (1.0f - y * y);
    }
    dx[j * kLanes] = slope;
  }
}

PEARL_DEVICE void linear(const Lane& lane, const Instruction& i) {
  const float* parameters = lane.context.parameters[i.parameters];
  const float* weight = parameters + i.weight;
  const float* bias = i.bias == kNone ? nullptr : parameters + i.bias;
  const int whole = i.out_width / 8 * 8;
  for (int first = lane.slice * 8; first < whole; first += 8 * lane.slices) linear_tile<8>(lane, i, weight, bias, first);
  for (int n = whole + lane.slice; n < i.out_width; n += lane.slices) linear_tile<1>(lane, i, weight, bias, n);
}

PEARL_DEVICE void slope_linear(const Lane& lane, const Instruction& i) {
  const float* weight = lane.context.parameters[i.parameters] + i.weight;
  const int whole = i.out_width / 8 * 8;
  for (int first = lane.slice * 8; first < whole; first += 8 * lane.slices) slope_tile<8>(lane, i, weight, first);
  for (int n = whole + lane.slice; n < i.out_width; n += lane.slices) slope_tile<1>(lane, i, weight, n);
}

// Stores a result row by row, for the gradients of weights.
PEARL_DEVICE void keep_rows(const Lane& lane, const Instruction& i) {
  float* rows = lane.context.rows + i.rows + lane.row * i.rows_stride;
  const float* y = lane.at(i.out);
  for (int f = lane.slice; f < i.out_width; f += lane.slices) rows[f] = y[f * kLanes];
}

// One lane's view of a tile.
struct TileLane {
  int lane;
#if PEARL_SLICED
  int slice, slices;
#else
  static constexpr int slice = 0, slices = 1;
#endif

  PEARL_DEVICE bool is_first() const { return lane == 0 && slice == 0; }
};

PEARL_DEVICE TileLane tile_lane(const Place& place) {
#if PEARL_SLICED
  return {static_cast<int>(place.lane), static_cast<int>(place.row), static_cast<int>(place.rows)};
#else
  return {static_cast<int>(place.lane)};
#endif
}

// Calls visit(place in the vector, gradient) for this lane's part of a tile.
template <class Visit>
PEARL_DEVICE void for_gradients(const Context& c, const Tile& tile, const TileLane& here, Visit visit) {
  const int lane = here.lane;
  const std::int64_t group_floats = c.arena_features * kLanes;
  if (tile.in == 0 || tile.begin == 0) {  // a vector, or the biases: a lane each
    const std::int64_t to = tile.in == 0 ? tile.weight : tile.bias;
    const int step = kLanes * here.slices;
    for (int n = here.slice * kLanes + lane; to != kNone && n < tile.count; n += step) {
      float sum = 0.0f;
      const float* slopes = c.arena + static_cast<std::int64_t>(tile.slopes + n) * kLanes;
      for (int g = 0; g < c.groups; ++g, slopes += group_floats)
        for (int r = 0; r < kLanes; ++r) sum += slopes[r];
      visit(to + tile.first + n, sum);
    }
    if (tile.in == 0) return;
  }
  for (int begin = tile.begin + here.slice * kLanes; begin < tile.end; begin += kLanes * here.slices) {
    const int k = begin + lane;
    float sums[kTileRows] = {};
    const float* slopes = c.arena + static_cast<std::int64_t>(tile.slopes) * kLanes;
    const float* x = c.rows + tile.rows + k;
    for (int g = 0; g < c.groups; ++g, slopes += group_floats) {
      for (int r = 0; r < kLanes; ++r, x += tile.rows_stride) {
        const float value = *x;
#pragma unroll
        for (int j = 0; j < kTileRows; ++j) sums[j] = math::fma(slopes[j * kLanes + r], value, sums[j]);
      }
    }
    // Loops over all 8 keep the sums in registers. Full vectors have their own branch: they need no masks.
    std::int64_t at = tile.weight + static_cast<std::int64_t>(tile.first) * tile.in + k;
    if (begin + kLanes <= tile.in) {
#pragma unroll
      for (int j = 0; j < kTileRows; ++j, at += tile.in)
        if (j < tile.count) visit(at, sums[j]);
    } else if (k < tile.in) {
#pragma unroll
      for (int j = 0; j < kTileRows; ++j, at += tile.in)
        if (j < tile.count) visit(at, sums[j]);
    }
  }
}

// The same for stored gradients.
template <class Visit>
PEARL_DEVICE void for_kept_gradients(const Tile& tile, const TileLane& here, const float* gradients, Visit visit) {
  const int lane = here.lane;
  if (tile.in == 0 || tile.begin == 0) {
    const std::int64_t to = tile.in == 0 ? tile.weight : tile.bias;
    const int step = kLanes * here.slices;
    for (int n = here.slice * kLanes + lane; to != kNone && n < tile.count; n += step)
      visit(to + tile.first + n, gradients[to + tile.first + n]);
    if (tile.in == 0) return;
  }
  for (int j = 0; j < tile.count; ++j)
    for (int k = tile.begin + here.slice * kLanes + lane; k < tile.end && k < tile.in; k += kLanes * here.slices) {
      const std::int64_t at = tile.weight + static_cast<std::int64_t>(tile.first + j) * tile.in + k;
      visit(at, gradients[at]);
    }
}

template <class Visit>
PEARL_DEVICE void move_tile(const Context& c, const Tile& tile, const TileLane& lane, int policy, const Visit& move) {
  if (c.max_grad_norm > 0.0f)
    for_kept_gradients(tile, lane, c.gradients[policy], move);
  else
    for_gradients(c, tile, lane, move);
}

// Adds up the sums of all work-groups. Records a failure and returns false where the loss is not finite.
PEARL_DEVICE bool healthy(const Context& c, bool policy, Sums& total) {
  total = {};
  Outcome& outcome = *c.outcome;
  if (!no_failure_pending(outcome)) return false;
  for (int g = 0; g < c.groups; ++g) {
    total.loss += c.sums[g].loss;
    total.td_error += c.sums[g].td_error;
    total.policy_loss += c.sums[g].policy_loss;
    total.entropy_gap += c.sums[g].entropy_gap;
  }
  if (finite(policy ? total.policy_loss : total.loss)) return true;
  note_failure(outcome, kDiverged);
  return false;
}

}  // namespace

#if PEARL_HAS_TAPE

PEARL_KERNEL pearl_run_tape(const Context* context, const Instruction* tape, int count, const StepNumbers* numbers) {
  const Place place = place_here();
  const Context& c = *context;
  if (c.outcome->failure != 0) return;
  const std::uint64_t step = numbers->step;
  const int group = static_cast<int>(place.group);
  const int lane_index = static_cast<int>(place.lane);
  const Lane lane{c, c.arena + c.arena_features * kLanes * group + lane_index, lane_index,
                  static_cast<std::int64_t>(group) * kLanes + lane_index,
#if PEARL_SLICED
                  static_cast<int>(place.row), static_cast<int>(place.rows)
#endif
  };
  Sums scored{};
  for (int index = 0; index < count; ++index) {
    const Instruction& i = tape[index];
    run_instruction(lane, i, step, scored);
    if (i.rows != kNone) {
#if PEARL_SLICED
      barrier(place);
#endif
      keep_rows(lane, i);
    }
#if PEARL_SLICED
    barrier(place);
#endif
  }
  const float loss = sum(place, scored.loss), td_error = sum(place, scored.td_error);
  const float policy = sum(place, scored.policy_loss), gap = sum(place, scored.entropy_gap);
  if (lane_index == 0 && lane.slice == 0) c.sums[group] = {loss, td_error, policy, gap};
}

// With clipping: stores the gradients of all tiles, and the sums of their squares.
PEARL_KERNEL pearl_gradients(const Context* context, const Tile* tiles, int policy) {
  const Place place = place_here();
  const Context& c = *context;
  if (c.outcome->failure != 0) return;
  const int group = static_cast<int>(place.group);
  const TileLane lane = tile_lane(place);
  float squares = 0.0f;
  float* gradients = c.gradients[policy];
  const Tile tile = tiles[group];
  for_gradients(c, tile, lane, [&](std::int64_t at, float gradient) {
    gradients[at] = gradient;
    squares += gradient * gradient;
  });
  squares = sum(place, squares);
  if (lane.is_first()) c.squares[group] = squares;
}

#endif  // PEARL_HAS_TAPE

// Moves the weights of all tiles: by their slopes or, with clipping, by the stored gradients.
PEARL_KERNEL pearl_move_weights(const Context* context, const Tile* tiles, int count, const Optimizer* optimizer,
                                const StepNumbers* numbers, int policy) {
  const Place place = place_here();
  const Context& c = *context;
  Outcome& outcome = *c.outcome;
  if (outcome.failure != 0) return;
  const int group = static_cast<int>(place.group);
  const TileLane lane = tile_lane(place);
  Sums total;
  if (!healthy(c, policy != 0, total)) return;
  const bool clips = c.max_grad_norm > 0.0f;
  float factor = 1.0f, norm = 0.0f;
  if (clips) {
    for (int t = 0; t < count; ++t) norm += c.squares[t];
    norm = math::sqrt(norm);
    if (!finite(norm)) {
      outcome.failure = kDiverged;
      return;
    }
    factor = math::fmin(1.0f, c.max_grad_norm / (norm + 1e-6f));
  }
  const int vector = policy ? kActor : kOnline;
  float* const targets = c.parameters[vector + 1];
  const StepArguments step = numbers->moves[policy];
  const Tile tile = tiles[group];
  if (targets != nullptr && step.target > 0.0f)
    move_tile(c, tile, lane, policy, Mover<true>{*optimizer, c.parameters[vector], targets, step, factor});
  else
    move_tile(c, tile, lane, policy, Mover<false>{*optimizer, c.parameters[vector], nullptr, step, factor});
  if (group == 0 && lane.is_first()) note_step(c, policy != 0, total.loss, total.td_error, norm);
}

// SAC: moves the temperature by the entropy of the batch.
PEARL_KERNEL pearl_move_temperature(const Context* context, const Optimizer* optimizer, const StepNumbers* numbers) {
  const Place place = place_here();
  const Context& c = *context;
  if (c.outcome->failure != 0 || place.lane != 0) return;
  Sums total;
  if (!healthy(c, true, total)) return;
  const Mover<false> move{*optimizer, c.log_alpha, nullptr, numbers->moves[2], 1.0f};
  move(0, -total.entropy_gap / static_cast<float>(c.batch));
}
