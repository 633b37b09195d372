// A policy that draws its actions, with the value network: for the whole vector of environments in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pearl/learner/action_distribution.hpp"

namespace pearl::learner {

// Offsets in the weights of `(inputs,)` each; kNone: observations are taken as they are.
struct Normalization {
  std::ptrdiff_t mean = kNone, scale = kNone;
};

// Used from one thread at a time. The networks are the caller's and outlive it. `weights` are the networks' parameters
// and whatever else the offsets name.
class RolloutPolicy {
 public:
  RolloutPolicy(const PolicyAndValue& networks, const Normalization& normalization);

  const PolicyAndValue& networks() const { return networks_; }

  // Actions `(count, size)`, std::int64_t or float, drawn for observations `(count, inputs)` by noise `(count, size)`:
  // uniform in [0, 1) for categorical parts, else standard normal; their log probabilities and the values `(count,)`.
  void explore(const float* weights, const float* obs, const float* noise, std::size_t count, void* actions,
               float* log_probs, float* values);
  void values(const float* weights, const float* obs, std::size_t count, float* values);

 private:
  void evaluate(const float* weights, const float* obs, std::size_t count, float* values);
  void draw_parts(const float* noise, std::size_t count, std::int64_t* actions, float* log_probs);
  void draw_normal(const float* log_std, const float* noise, std::size_t count, float* actions, float* log_probs);

  std::size_t panel_size() const { return networks_.policy->kernels().panel; }

  PolicyAndValue networks_;
  Normalization normalization_;
  Workspace policy_, value_;  // one panel each
};

}  // namespace pearl::learner
