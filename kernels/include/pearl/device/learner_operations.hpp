// The operations of the Learner's tape (pearl/tape.hpp) on parallel devices, but for those on matrices, which each kind of
// device has in its own way. With PEARL_SLICED, several rows of lanes share the features of a value.
#pragma once

#include "pearl/device/group.hpp"
#include "pearl/device/learner_math.hpp"
#include "pearl/tape.hpp"

#ifndef PEARL_SLICED
#define PEARL_SLICED 0
#endif
#ifndef PEARL_RULE  // pearl::tape::Rule. The kernels that have none are compiled with the first.
#define PEARL_RULE 0
#endif
#define PEARL_HAS_TAPE (PEARL_RULE == 0)

using namespace pearl::tape;
using pearl::device::Atomic;
using pearl::device::barrier;
using pearl::device::Place;
using pearl::device::place_here;
using pearl::device::sum;

namespace {

// One lane's view: its transition in the arena.
struct Lane {
  const Context& context;
  float* arena;  // of its 16 transitions, at this one
  int lane;
  std::int64_t row;  // of the batch
#if PEARL_SLICED
  int slice, slices;
#else
  static constexpr int slice = 0, slices = 1;
#endif
#ifdef PEARL_CUDA_KERNELS
  int thread, threads, block, blocks;  // the thread in its block, and the block in its cluster
#endif

  PEARL_DEVICE float* at(int feature) const { return arena + static_cast<std::int64_t>(feature) * kLanes; }
  // A feature of the first of the 16 transitions.
  PEARL_DEVICE float* of_all(int feature) const { return at(feature) - lane; }
};

// out = activation(weight x + bias), and its slopes: of each kind of device.
PEARL_DEVICE void linear(const Lane& lane, const Instruction& i);
PEARL_DEVICE void slope_linear(const Lane& lane, const Instruction& i);
#ifdef PEARL_CUDA_KERNELS
PEARL_DEVICE void send(const Lane& lane, const Instruction& i);
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
      case Operation::relu: value = activated(x, Activation::relu); break;
      case Operation::tanh: value = math::tanh(x); break;
      case Operation::combine: value = x + i.scalar * lane.at(i.other + (i.other_width == 1 ? 0 : f))[0]; break;
      case Operation::slope_activation: {
        const float slope = *y;
        value = i.activation == Activation::relu ? (x > 0.0f ? slope : 0.0f) : slope * (1.0f - x * x);
        break;
      }
      case Operation::slope_relu: value = lane.at(i.other + f)[0] > 0.0f ? x : 0.0f; break;
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

// Of several lanes that fail, any is named.
PEARL_DEVICE void fail(const Lane& lane, int failure) {
  Atomic<std::int32_t>(lane.context.outcome->failed_at).store(static_cast<int>(lane.row));
  Atomic<std::int32_t>(lane.context.outcome->pending).store(failure);
}

// Every work-item may note it.
PEARL_DEVICE void note_failure(Outcome& outcome, std::int32_t failure) {
  Atomic<std::int32_t>(outcome.failure).store(failure);
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

PEARL_DEVICE void run_instruction(const Lane& lane, const Instruction& i, std::uint64_t step, Sums& scored) {
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
#ifdef PEARL_CUDA_KERNELS
    case Operation::send: send(lane, i); break;
#endif
    case Operation::none: break;
    default: elementwise(lane, i);
  }
}

template <bool has_targets>
using Mover = WeightMover<PEARL_RULE, has_targets>;

// Takes over a failure that the tape has noted. Returns whether there was none.
PEARL_DEVICE bool no_failure_pending(Outcome& outcome) {
  if (outcome.pending == 0) return true;
  note_failure(outcome, outcome.pending);
  return false;
}

// Adds a step's sums to the outcome for the host.
PEARL_DEVICE void note_step(const Context& c, bool policy, float loss, float td_error, float norm) {
  Outcome& outcome = *c.outcome;
  if (policy) {
    outcome.totals[3] += norm;
    return;
  }
  outcome.totals[0] += loss / static_cast<float>(c.batch);
  outcome.totals[1] += td_error / static_cast<float>(c.batch);
  outcome.totals[2] += norm;
  ++outcome.steps;
}

}  // namespace
