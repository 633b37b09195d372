#include "pearl/learner/rollout_policy.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "pearl/errors.hpp"

namespace pearl::learner {
namespace {

constexpr float kClip = 10.0f;  // normalised observations lie within so many deviations

// log(sum of exp(x)) of `count` logits, `stride` floats apart, without overflow.
float log_sum_exp(const float* logits, std::size_t count, std::size_t stride) {
  float top = logits[0], sum = 0.0f;
  for (std::size_t k = 1; k < count; ++k) top = std::max(top, logits[k * stride]);
  for (std::size_t k = 0; k < count; ++k) sum += std::exp(logits[k * stride] - top);
  return top + std::log(sum);
}

}  // namespace

RolloutPolicy::RolloutPolicy(const PolicyAndValue& networks, const Normalization& normalization)
    : networks_(networks),
      normalization_(normalization),
      policy_(*networks.policy, 1, false),
      value_(*networks.value, 1, false) {
  networks_.check();
  const std::size_t inputs = networks_.policy->input_width(), parameters = networks_.policy->parameters();
  const auto fits = [&](std::ptrdiff_t offset) {
    return offset >= 0 && inputs <= parameters && static_cast<std::size_t>(offset) <= parameters - inputs;
  };
  const bool none = normalization_.mean == kNone && normalization_.scale == kNone;
  if (!none && !(fits(normalization_.mean) && fits(normalization_.scale)))
    throw LearnerError("Mean and scale of observations must lie in the " + std::to_string(parameters) +
                       " weights; found offsets " + std::to_string(normalization_.mean) + " and " +
                       std::to_string(normalization_.scale) + ".");
}

void RolloutPolicy::explore(const float* weights, const float* obs, const float* noise, std::size_t count,
                            void* actions, float* log_probs, float* values) {
  const std::size_t panel = panel_size(), size = networks_.distribution.size;
  for (std::size_t first = 0; first < count; first += panel) {
    const std::size_t rows = std::min(panel, count - first), at = first * size;
    evaluate(weights, obs + first * networks_.policy->input_width(), rows, values + first);
    networks_.policy->forward(weights, policy_, 1, rows, networks_.policy->columns(rows));
    if (networks_.distribution.categorical())
      draw_parts(noise + at, rows, static_cast<std::int64_t*>(actions) + at, log_probs + first);
    else
      draw_normal(weights + networks_.distribution.log_std, noise + at, rows, static_cast<float*>(actions) + at,
                  log_probs + first);
  }
}

void RolloutPolicy::values(const float* weights, const float* obs, std::size_t count, float* values) {
  const std::size_t panel = panel_size();
  for (std::size_t first = 0; first < count; first += panel)
    evaluate(weights, obs + first * networks_.policy->input_width(), std::min(panel, count - first), values + first);
}

// Loads the observations for both networks, and evaluates the values.
void RolloutPolicy::evaluate(const float* weights, const float* obs, std::size_t count, float* values) {
  const Network &policy = *networks_.policy, &value = *networks_.value;
  const std::size_t panel = panel_size(), inputs = policy.input_width();
  float* x = policy_.value(0, 0);
  policy.load(obs, count, policy_, 0);
  if (normalization_.mean != kNone)
    for (std::size_t f = 0; f < inputs; ++f) {
      const float mean = weights[normalization_.mean + static_cast<std::ptrdiff_t>(f)];
      const float scale = weights[normalization_.scale + static_cast<std::ptrdiff_t>(f)];
      for (std::size_t c = 0; c < count; ++c)
        x[f * panel + c] = std::clamp((x[f * panel + c] - mean) * scale, -kClip, kClip);
    }
  std::copy_n(x, inputs * panel, value_.value(0, 0));
  value.forward(weights, value_, 1, count, value.columns(count));
  std::copy_n(value_.value(value.output(), 0), count, values);
}

void RolloutPolicy::draw_parts(const float* noise, std::size_t count, std::int64_t* actions, float* log_probs) {
  const ActionDistribution& distribution = networks_.distribution;
  const std::size_t panel = panel_size(), parts = distribution.size;
  const float* outputs = policy_.value(networks_.policy->output(), 0);
  for (std::size_t c = 0; c < count; ++c) {
    const float* logits = outputs + c;
    float log_prob = 0.0f;
    for (std::size_t part = 0; part < parts; ++part) {
      const std::size_t choices = distribution.sizes[part];
      const float log_sum = log_sum_exp(logits, choices, panel), uniform = noise[c * parts + part];
      // The first choice whose cumulative probability exceeds the noise; the last one takes the rest.
      std::size_t chosen = 0;
      float cumulative = 0.0f;
      for (std::size_t k = 0; k + 1 < choices; ++k) {
        cumulative += std::exp(logits[k * panel] - log_sum);
        chosen += cumulative <= uniform ? 1 : 0;
      }
      actions[c * parts + part] = static_cast<std::int64_t>(chosen);
      log_prob += logits[chosen * panel] - log_sum;
      logits += choices * panel;
    }
    log_probs[c] = log_prob;
  }
}

void RolloutPolicy::draw_normal(const float* log_std, const float* noise, std::size_t count, float* actions,
                                float* log_probs) {
  const std::size_t panel = panel_size(), size = networks_.distribution.size;
  const float* means = policy_.value(networks_.policy->output(), 0);
  std::fill_n(log_probs, count, 0.0f);
  for (std::size_t j = 0; j < size; ++j) {
    const float deviation = std::exp(log_std[j]), inverse = std::exp(-log_std[j]);
    for (std::size_t c = 0; c < count; ++c) {
      const float mean = means[j * panel + c], action = mean + deviation * noise[c * size + j];
      // The log probability of the rounded action, as the Learner sees it.
      const float distance = (action - mean) * inverse;
      actions[c * size + j] = action;
      log_probs[c] -= 0.5f * distance * distance + log_std[j] + kHalfLog2Pi;
    }
  }
}

}  // namespace pearl::learner
