// The Learner: one kernel runs a tape (pearl/tape.hpp) of forward, loss and backward, on 16 transitions per work-group;
// another moves the weights, a tile per work-group. With PEARL_SLICED, the rows of a work-group share the neurons of each
// layer, and the columns of a tile.
#pragma once

#include "pearl/device/group.hpp"
#include "pearl/device/learner_math.hpp"
#include "pearl/tape.hpp"

#ifndef PEARL_SLICED
#define PEARL_SLICED 0
#endif
#ifndef PEARL_RULE  // pearl::tape::Rule
#define PEARL_RULE 0
#endif

using namespace pearl::tape;
using pearl::device::barrier;
using pearl::device::kLanesAreThreads;
using pearl::device::Place;
using pearl::device::place_here;
using pearl::device::sum;

namespace {

// One lane's view: its transition in the arena.
struct Lane {
  const Context& context;
  float* arena;  // of the work-group, at this lane
  int lane;
  std::int64_t row;  // of the batch
#if PEARL_SLICED
  int slice, slices;
#else
  static constexpr int slice = 0, slices = 1;
#endif

  PEARL_DEVICE float* at(int feature) const { return arena + static_cast<std::int64_t>(feature) * kLanes; }
  // A feature of the work-group's first transition.
  PEARL_DEVICE float* of_all(int feature) const { return at(feature) - lane; }
};

// Four floats that threads load and store at once.
struct alignas(16) Four {
  float values[4];
};

PEARL_DEVICE const Four& four_at(const float* floats) { return *reinterpret_cast<const Four*>(floats); }
PEARL_DEVICE Four& four_at(float* floats) { return *reinterpret_cast<Four*>(floats); }

// Whether each row of a matrix consists of whole fours.
PEARL_DEVICE bool in_fours(const float* matrix, int width) {
  return width % 4 == 0 && reinterpret_cast<std::uintptr_t>(matrix) % sizeof(Four) == 0;
}

#ifdef PEARL_CUDA_KERNELS

// A thread computes up to 4 features of 4 transitions, so that what it loads serves 4 times. Which, is its place in the
// work-group: `quad` of the transitions, and `part` of the features.
struct Quads {
  int quad, part, parts;
};

PEARL_DEVICE Quads quads_of(const Lane& lane) {
  const int thread = lane.slice * kLanes + lane.lane;
  return {thread % 4, thread / 4, lane.slices * kLanes / 4};
}

// Calls tile4(first feature) and, for what is left of `width`, tile1(feature) for this thread's part.
template <class Tile4, class Tile1>
PEARL_DEVICE void for_features(const Quads& quads, int width, Tile4 tile4, Tile1 tile1) {
  const int whole = width / 4 * 4;
  for (int first = quads.part * 4; first < whole; first += quads.parts * 4) tile4(first);
  for (int feature = whole + quads.part; feature < width; feature += quads.parts) tile1(feature);
}

// The sums are those of one transition at a time, to the bit.
template <int Count>
PEARL_DEVICE void linear_tile(const Lane& lane, const Instruction& i, const float* weight, const float* bias, int first,
                              int quad) {
  Four sums[Count];
#pragma unroll
  for (int j = 0; j < Count; ++j)
#pragma unroll
    for (int t = 0; t < 4; ++t) sums[j].values[t] = bias != nullptr ? bias[first + j] : 0.0f;
  const float* const x = lane.of_all(i.in) + quad * 4;
  const float* const w = weight + static_cast<std::int64_t>(first) * i.in_width;
  int k = 0;
  if (in_fours(w, i.in_width)) {
    for (; k < i.in_width; k += 4) {
      Four values[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) values[m] = four_at(x + (k + m) * kLanes);
#pragma unroll
      for (int j = 0; j < Count; ++j) {
        const Four row = four_at(w + j * i.in_width + k);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int t = 0; t < 4; ++t)
            sums[j].values[t] = math::fma(row.values[m], values[m].values[t], sums[j].values[t]);
      }
    }
  }
  for (; k < i.in_width; ++k) {
    const Four value = four_at(x + k * kLanes);
#pragma unroll
    for (int j = 0; j < Count; ++j)
#pragma unroll
      for (int t = 0; t < 4; ++t)
        sums[j].values[t] = math::fma(w[j * i.in_width + k], value.values[t], sums[j].values[t]);
  }
  float* const y = lane.of_all(i.out + first) + quad * 4;
#pragma unroll
  for (int j = 0; j < Count; ++j) {
#pragma unroll
    for (int t = 0; t < 4; ++t) sums[j].values[t] = activated(sums[j].values[t], i.activation);
    four_at(y + j * kLanes) = sums[j];
  }
}

template <int Count>
PEARL_DEVICE void slope_tile(const Lane& lane, const Instruction& i, const float* weight, int first, int quad) {
  Four sums[Count];
#pragma unroll
  for (int j = 0; j < Count; ++j) sums[j] = {};
  const float* const dy = lane.of_all(i.in) + quad * 4;
  const float* const w = weight + first;
  const bool fours = Count == 4 && in_fours(w, i.out_width);
#pragma unroll 4
  for (int n = 0; n < i.in_width; ++n) {
    const Four slope = four_at(dy + n * kLanes);
    const float* const row = w + static_cast<std::int64_t>(n) * i.out_width;
    Four weights{};
    if (fours) {
      weights = four_at(row);
    } else {
#pragma unroll
      for (int j = 0; j < Count; ++j) weights.values[j] = row[j];
    }
#pragma unroll
    for (int j = 0; j < Count; ++j)
#pragma unroll
      for (int t = 0; t < 4; ++t)
        sums[j].values[t] = math::fma(weights.values[j], slope.values[t], sums[j].values[t]);
  }
  float* const dx = lane.of_all(i.out + first) + quad * 4;
  const bool adds = (i.flags & kAccumulate) != 0;
#pragma unroll
  for (int j = 0; j < Count; ++j) {
    Four slopes = sums[j];
    if (adds) {
      const Four before = four_at(dx + j * kLanes);
#pragma unroll
      for (int t = 0; t < 4; ++t) slopes.values[t] += before.values[t];
    }
    if (i.activation != Activation::none) {
      const Four there = four_at(lane.of_all(i.other + first + j) + quad * 4);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float y = there.values[t];
        float& slope = slopes.values[t];
        slope = i.activation == Activation::relu ? (y > 0.0f ? slope : 0.0f) : slope * (1.0f - y * y);
      }
    }
    four_at(dx + j * kLanes) = slopes;
  }
}

PEARL_DEVICE void linear(const Lane& lane, const Instruction& i) {
  const float* parameters = lane.context.parameters[i.parameters];
  const float* weight = parameters + i.weight;
  const float* bias = i.bias == kNone ? nullptr : parameters + i.bias;
  const Quads quads = quads_of(lane);
  for_features(
      quads, i.out_width, [&](int first) { linear_tile<4>(lane, i, weight, bias, first, quads.quad); },
      [&](int feature) { linear_tile<1>(lane, i, weight, bias, feature, quads.quad); });
}

PEARL_DEVICE void slope_linear(const Lane& lane, const Instruction& i) {
  const float* weight = lane.context.parameters[i.parameters] + i.weight;
  const Quads quads = quads_of(lane);
  for_features(
      quads, i.out_width, [&](int first) { slope_tile<4>(lane, i, weight, first, quads.quad); },
      [&](int feature) { slope_tile<1>(lane, i, weight, feature, quads.quad); });
}

#else

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

#endif

PEARL_DEVICE void load(const Lane& lane, const Instruction& i) {
  const float* rows = static_cast<const float*>(lane.context.columns[i.column]) + lane.row * i.out_width;
  const bool real = lane.row < lane.context.batch;
  const float* scale = i.in == kNone ? nullptr : lane.context.scales + i.in;
  float* y = lane.at(i.out);
  for (int f = lane.slice; f < i.out_width; f += lane.slices) {
    float value = real ? rows[f] : 0.0f;
    if (scale != nullptr && real) value = (value - scale[f]) / scale[i.out_width + f];
    y[f * kLanes] = value;
  }
}

// Stores a result row by row, for the gradients of weights.
PEARL_DEVICE void keep_rows(const Lane& lane, const Instruction& i) {
  float* rows = lane.context.rows + i.rows + lane.row * i.rows_stride;
  const float* y = lane.at(i.out);
  for (int f = lane.slice; f < i.out_width; f += lane.slices) rows[f] = y[f * kLanes];
}

PEARL_DEVICE void layer_norm(const Lane& lane, const Instruction& i) {
  const float* parameters = lane.context.parameters[i.parameters];
  const float* x = lane.at(i.in);
  float* y = lane.at(i.out);
  const float share = 1.0f / static_cast<float>(i.out_width);
  float sum = 0.0f, squares = 0.0f;
  for (int f = 0; f < i.out_width; ++f) sum += x[f * kLanes];
  const float mean = sum * share;
  for (int f = 0; f < i.out_width; ++f) {
    const float centered = x[f * kLanes] - mean;
    squares += centered * centered;
  }
  const float inverse = 1.0f / math::sqrt(squares * share + i.scalar);
  if (lane.slice == 0) {
    lane.at(i.other)[0] = mean;
    lane.at(i.other)[kLanes] = inverse;
  }
  for (int f = lane.slice; f < i.out_width; f += lane.slices) {
    float value = (x[f * kLanes] - mean) * inverse;
    if (i.weight != kNone) value *= parameters[i.weight + f];
    if (i.bias != kNone) value += parameters[i.bias + f];
    y[f * kLanes] = value;
  }
}

PEARL_DEVICE void slope_layer_norm(const Lane& lane, const Instruction& i) {
  const float* gain = i.weight == kNone ? nullptr : lane.context.parameters[i.parameters] + i.weight;
  const float* dy = lane.at(i.in);
  const float* x = lane.at(i.extra);
  const float mean = lane.at(i.other)[0], inverse = lane.at(i.other)[kLanes];
  const float share = 1.0f / static_cast<float>(i.in_width);
  float slopes = 0.0f, products = 0.0f;
  for (int f = 0; f < i.in_width; ++f) {
    const float slope = gain == nullptr ? dy[f * kLanes] : dy[f * kLanes] * gain[f];
    slopes += slope;
    products += slope * ((x[f * kLanes] - mean) * inverse);
  }
  slopes *= share;
  products *= share;
  for (int f = lane.slice; f < i.in_width; f += lane.slices) {
    const float unit = (x[f * kLanes] - mean) * inverse;
    if (i.extra2 != kNone) lane.at(i.extra2)[f * kLanes] = dy[f * kLanes] * unit;
    if (i.out == kNone) continue;
    const float slope = gain == nullptr ? dy[f * kLanes] : dy[f * kLanes] * gain[f];
    const float value = inverse * (slope - slopes - unit * products);
    float* dx = lane.at(i.out) + f * kLanes;
    *dx = (i.flags & kAccumulate) != 0 ? *dx + value : value;
  }
}

PEARL_DEVICE void elementwise(const Lane& lane, const Instruction& i) {
  const bool adds = (i.flags & kAccumulate) != 0;
  for (int f = lane.slice; f < i.out_width; f += lane.slices) {
    float* y = lane.at(i.out + f);
    const float x = lane.at(i.in + (i.in_width == 1 ? 0 : f))[0];
    float value = 0.0f;
    switch (i.operation) {
      case Operation::relu:
        value = activated(x, Activation::relu);
        break;
      case Operation::tanh:
        value = math::tanh(x);
        break;
      case Operation::combine:
        value = x + i.scalar * lane.at(i.other + (i.other_width == 1 ? 0 : f))[0];
        break;
      case Operation::slope_activation: {
        const float slope = *y;
        value = i.activation == Activation::relu ? (x > 0.0f ? slope : 0.0f) : slope * (1.0f - x * x);
        break;
      }
      case Operation::slope_relu:
        value = lane.at(i.other + f)[0] > 0.0f ? x : 0.0f;
        break;
      case Operation::slope_tanh: {
        const float there = lane.at(i.other + f)[0];
        value = x * (1.0f - there * there);
        break;
      }
      default:  // slope_mean, and slope_combine of equal widths
        value = x * i.scalar;
    }
    *y = adds ? *y + value : value;
  }
}

// The sum over features: mean, and slope_combine of a value of width 1.
PEARL_DEVICE void reduce(const Lane& lane, const Instruction& i) {
  if (lane.slice != 0) return;
  float sum = 0.0f;
  for (int f = 0; f < i.in_width; ++f) sum += lane.at(i.in + f)[0];
  float* y = lane.at(i.out);
  *y = (i.flags & kAccumulate) != 0 ? *y + i.scalar * sum : i.scalar * sum;
}

PEARL_DEVICE void fail(const Lane& lane, int failure) {
  lane.context.outcome->failed_at = static_cast<int>(lane.row);
  lane.context.outcome->pending = failure;
}

PEARL_DEVICE int best_action(const float* values, int actions) {
  int best = 0;
  float leader = values[0];
  for (int a = 1; a < actions; ++a) {
    const float value = values[a * kLanes];
    const bool better = value > leader || (value != value && leader == leader);
    best = better ? a : best;
    leader = better ? value : leader;
  }
  return best;
}

PEARL_DEVICE void dqn_loss(const Lane& lane, const Instruction& i, Sums& scored) {
  if (lane.slice != 0) return;
  const Context& c = lane.context;
  float* slopes = lane.at(i.out);
  for (int a = 0; a < i.in_width; ++a) slopes[a * kLanes] = 0.0f;
  if (lane.row >= c.batch) return;
  const std::int64_t action = static_cast<const std::int64_t*>(c.columns[1])[lane.row];
  if (action < 0 || action >= i.in_width) return fail(lane, kWrongAction);
  const float* next = lane.at(i.other);
  const float next_value = next[best_action(lane.at(i.extra), i.in_width) * kLanes];
  const float target = static_cast<const float*>(c.columns[2])[lane.row] +
                       static_cast<const float*>(c.columns[4])[lane.row] * next_value;
  const float error = lane.at(i.in)[action * kLanes] - target, distance = math::fabs(error);
  const float share = c.weights[lane.row] / static_cast<float>(c.batch);
  float loss, slope;
  if (distance < 1.0f) {
    loss = 0.5f * error * error;
    slope = error * share;
  } else {
    loss = distance - 0.5f;
    slope = error > 0.0f ? share : error < 0.0f ? -share : error;  // a NaN stays one
  }
  slopes[action * kLanes] = slope;
  c.priorities[lane.row] = distance;
  scored.loss += c.weights[lane.row] * loss;
  scored.td_error += distance;
}

PEARL_DEVICE void act(const Lane& lane, const Instruction& i, std::uint64_t step) {
  if (lane.slice != 0) return;
  const Context& c = lane.context;
  const int actions = c.action_size;
  const bool real = lane.row < c.batch;
  float log_density = 0.0f;
  for (int a = 0; a < actions; ++a) {
    const float said = lane.at(i.in + a)[0];
    const std::uint64_t index = static_cast<std::uint64_t>(lane.row) * actions + a;
    float unit;
    if (c.stochastic) {
      const float n = real ? normal_at(c.noise_seed, step, static_cast<std::uint32_t>(i.column), index) : 0.0f;
      const float log_std = math::clamp(lane.at(i.in + actions + a)[0], c.log_std_low, c.log_std_high);
      const float x = said + math::exp(log_std) * n;
      log_density -= 0.5f * n * n + log_std + kHalfLog2Pi + 2.0f * (kLog2 - x - softplus(-2.0f * x));
      unit = math::tanh(x);
    } else {
      unit = math::tanh(said);
      if (i.column == 0 && c.target_noise > 0.0f && real) {
        const float disturbance =
            math::clamp(c.target_noise * normal_at(c.noise_seed, step, 0, index), -c.noise_clip, c.noise_clip);
        unit = math::clamp(unit + disturbance, -1.0f, 1.0f);
      }
    }
    lane.at(i.out + a)[0] = unit;
  }
  if (i.extra != kNone) lane.at(i.extra)[0] = log_density;
}

PEARL_DEVICE void critic_loss(const Lane& lane, const Instruction& i, Sums& scored) {
  if (lane.slice != 0) return;
  const Context& c = lane.context;
  const bool two = c.critics == 2;
  if (lane.row >= c.batch) {
    lane.at(i.out)[0] = 0.0f;
    if (two) lane.at(i.out2)[0] = 0.0f;
    return;
  }
  float next_value = lane.at(i.other)[0];
  if (two) {
    const float second = lane.at(i.extra2)[0];
    if (second < next_value || second != second) next_value = second;
  }
  if (c.stochastic) next_value -= math::exp(*c.log_alpha) * lane.at(i.extra3)[0];
  const float target = static_cast<const float*>(c.columns[2])[lane.row] +
                       static_cast<const float*>(c.columns[4])[lane.row] * next_value;
  const float weight = c.weights[lane.row], share = weight / static_cast<float>(c.batch);
  float largest = 0.0f;
  for (int k = 0; k < (two ? 2 : 1); ++k) {
    const float error = lane.at(k == 0 ? i.in : i.extra)[0] - target;
    lane.at(k == 0 ? i.out : i.out2)[0] = 2.0f * error * share;
    scored.loss += weight * error * error;
    const float distance = math::fabs(error);
    largest = distance > largest || distance != distance ? distance : largest;
  }
  c.priorities[lane.row] = largest;
  scored.td_error += largest;
}

PEARL_DEVICE void policy_loss(const Lane& lane, const Instruction& i, Sums& scored) {
  if (lane.slice != 0) return;
  const Context& c = lane.context;
  const bool two = i.extra != kNone, real = lane.row < c.batch;
  const float share = real ? 1.0f / static_cast<float>(c.batch) : 0.0f;
  float value = lane.at(i.in)[0], first_share = 1.0f;
  if (two) {
    // The smaller critic gets the gradient; equal ones share it, as in torch.minimum.
    const float second = lane.at(i.extra)[0];
    first_share = value < second ? 1.0f : value == second ? 0.5f : 0.0f;
    lane.at(i.out2)[0] = -share * (1.0f - first_share);
    value = first_share > 0.0f ? value : second;
  }
  lane.at(i.out)[0] = -share * first_share;
  if (!real) return;
  scored.policy_loss -= value;
  if (!c.stochastic) return;
  const float log_density = lane.at(i.other)[0];
  scored.policy_loss += math::exp(*c.log_alpha) * log_density;
  scored.entropy_gap += log_density + c.target_entropy;
}

PEARL_DEVICE void slope_act(const Lane& lane, const Instruction& i, std::uint64_t step) {
  if (lane.slice != 0) return;
  const Context& c = lane.context;
  const int actions = c.action_size;
  const bool real = lane.row < c.batch;
  const float share = 1.0f / static_cast<float>(c.batch);
  const float temperature = c.stochastic ? math::exp(*c.log_alpha) : 0.0f;
  for (int a = 0; a < actions; ++a) {
    const float unit = lane.at(i.extra2 + a)[0], said = lane.at(i.other + a)[0];
    float slope = lane.at(i.in + a)[0];
    if (i.extra != kNone) slope += lane.at(i.extra + a)[0];
    slope *= 1.0f - unit * unit;
    float deviation_slope = 0.0f;
    if (!c.stochastic) {
      const float excess = math::fabs(said) - kLinearRange;
      if (excess > 0.0f) slope += math::copysign(2.0f * c.saturation_penalty * excess * share, said);
    } else {
      // The log density contains -log(1 - tanh^2), whose slope is 2 tanh, and -log_std.
      slope += 2.0f * temperature * share * unit;
      const float raw = lane.at(i.other + actions + a)[0];
      const std::uint64_t index = static_cast<std::uint64_t>(lane.row) * actions + a;
      const float n = real ? normal_at(c.noise_seed, step, 1, index) : 0.0f;
      if (raw >= c.log_std_low && raw <= c.log_std_high)
        deviation_slope = slope * math::exp(raw) * n - temperature * share;
    }
    lane.at(i.out + a)[0] = real ? slope : 0.0f;
    if (c.stochastic) lane.at(i.out + actions + a)[0] = real ? deviation_slope : 0.0f;
  }
}

template <bool has_targets>
using Mover = WeightMover<PEARL_RULE, has_targets>;

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
      if constexpr (kLanesAreThreads) {
#pragma unroll 2
        for (int r = 0; r < kLanes; r += 4) {
          float values[4];
#pragma unroll
          for (int m = 0; m < 4; ++m, x += tile.rows_stride) values[m] = *x;
#pragma unroll
          for (int j = 0; j < kTileRows; ++j) {
            const Four four = four_at(slopes + j * kLanes + r);
#pragma unroll
            for (int m = 0; m < 4; ++m) sums[j] = math::fma(four.values[m], values[m], sums[j]);
          }
        }
      } else {
        for (int r = 0; r < kLanes; ++r, x += tile.rows_stride) {
          const float value = *x;
#pragma unroll
          for (int j = 0; j < kTileRows; ++j) sums[j] = math::fma(slopes[j * kLanes + r], value, sums[j]);
        }
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
  if (outcome.pending != 0) {
    outcome.failure = outcome.pending;
    return false;
  }
  for (int g = 0; g < c.groups; ++g) {
    total.loss += c.sums[g].loss;
    total.td_error += c.sums[g].td_error;
    total.policy_loss += c.sums[g].policy_loss;
    total.entropy_gap += c.sums[g].entropy_gap;
  }
  if (finite(policy ? total.policy_loss : total.loss)) return true;
  outcome.failure = kDiverged;
  return false;
}

}  // namespace

// In registers where a lane is a thread: stores to the arena would have it loaded again.
#ifdef PEARL_CUDA_KERNELS
using HeldInstruction = Instruction;
#else
using HeldInstruction = const Instruction&;
#endif

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
    const HeldInstruction i = tape[index];
    switch (i.operation) {
      case Operation::load: load(lane, i); break;
      case Operation::linear: linear(lane, i); break;
      case Operation::layer_norm: layer_norm(lane, i); break;
      case Operation::mean: reduce(lane, i); break;
      case Operation::slope_linear: slope_linear(lane, i); break;
      case Operation::slope_layer_norm: slope_layer_norm(lane, i); break;
      case Operation::slope_combine:
        if (i.out_width == 1 && i.in_width != 1)
          reduce(lane, i);
        else
          elementwise(lane, i);
        break;
      case Operation::dqn_loss: dqn_loss(lane, i, scored); break;
      case Operation::act: act(lane, i, step); break;
      case Operation::critic_loss: critic_loss(lane, i, scored); break;
      case Operation::policy_loss: policy_loss(lane, i, scored); break;
      case Operation::slope_act: slope_act(lane, i, step); break;
      default: elementwise(lane, i);
    }
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
  if (group != 0 || !lane.is_first()) return;
  if (policy) {
    outcome.totals[3] += norm;
    return;
  }
  outcome.totals[0] += total.loss / static_cast<float>(c.batch);
  outcome.totals[1] += total.td_error / static_cast<float>(c.batch);
  outcome.totals[2] += norm;
  ++outcome.steps;
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
