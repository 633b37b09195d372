// Shared by the Learner's kernels on parallel devices and on FPGAs: activations, noise, weight updates.
#pragma once

#include <cstdint>

#include "pearl/device/math.hpp"
#include "pearl/normal.hpp"
#include "pearl/philox.hpp"
#include "pearl/tape.hpp"

#ifdef PEARL_KERNELS

namespace pearl::tape {

namespace math = device::math;

inline constexpr float kLinearRange = 2.0f;  // tanh(2) = 0.96
inline constexpr float kLog2 = 0.6931471805599453f, kHalfLog2Pi = 0.9189385332046727f;

PEARL_DEVICE bool finite(float x) { return math::fabs(x) <= 3.4028234e38f; }

PEARL_DEVICE float softplus(float x) { return math::fmax(x, 0.0f) + math::log1p(math::exp(-math::fabs(x))); }

PEARL_DEVICE float activated(float x, Activation activation) {
  return activation == Activation::relu   ? (x > 0.0f || x != x ? x : 0.0f)
         : activation == Activation::tanh ? math::tanh(x)
                                          : x;
}

// Normal number `index` of a draw; see pearl/normal.hpp.
PEARL_DEVICE float normal_at(std::uint64_t seed, std::uint64_t step, std::uint32_t draw, std::uint64_t index) {
  const std::uint64_t block = index / 4;
  const PhiloxWords words = philox4x32({static_cast<std::uint32_t>(block), draw, static_cast<std::uint32_t>(step),
                                        static_cast<std::uint32_t>(step >> 32)},
                                       seed);
  const bool late = (index & 2) != 0;
  const NormalPair pair = normal_pair(late ? words[2] : words[0], late ? words[3] : words[1]);
  return (index & 1) != 0 ? pair.second : pair.first;
}

// Moves one entry of a vector of parameters. The rule, and whether targets move too, are compile-time parameters: a
// branch per weight would become masking and cost more than the arithmetic.
template <int rule, bool has_targets>
struct WeightMover {
  Optimizer optimizer;
  float* weights;
  float* targets;
  StepArguments step;
  float factor;

  PEARL_DEVICE void operator()(std::int64_t at, float gradient) const {
    const float before = weights[at];
    float weight = before * optimizer.shrink;
    gradient = gradient * factor + optimizer.decay * before;
    if constexpr (rule == kAdam || rule == kAmsgrad) {
      float m = optimizer.first[at], v = optimizer.second[at];
      m += optimizer.rise1 * (gradient - m);
      v = optimizer.rise2 * gradient * gradient + optimizer.beta2 * v;
      float top = v;
      if constexpr (rule == kAmsgrad) {
        top = math::fmax(v, optimizer.max_second[at]);
        optimizer.max_second[at] = top;
      }
      weight -= step.step_size * m / (math::sqrt(top) / step.denominator + optimizer.eps);
      optimizer.first[at] = m;
      optimizer.second[at] = v;
    } else {
      if constexpr (rule == kMomentum || rule == kNesterov) {
        const float momentum =
            step.fresh != 0.0f ? gradient : optimizer.momentum * optimizer.first[at] + optimizer.rise * gradient;
        optimizer.first[at] = momentum;
        gradient = rule == kNesterov ? gradient + optimizer.momentum * momentum : momentum;
      }
      weight -= optimizer.lr * gradient;
    }
    weights[at] = weight;
    if constexpr (has_targets) {
      const float from = targets[at];
      targets[at] = step.target >= 1.0f ? weight : from + step.target * (weight - from);
    }
  }
};

}  // namespace pearl::tape

#endif
