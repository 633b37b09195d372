#include "pearl/learner/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "pearl/errors.hpp"

namespace pearl::learner {

void Optimizer::set_adam(const AdamOptions& options, float* first, float* second, float* max_second, float* steps) {
  kind_ = Kind::adam;
  adam_ = options;
  first_ = first;
  second_ = second;
  max_second_ = max_second;
  steps_ = steps;
}

void Optimizer::set_sgd(const SgdOptions& options, float* momentum, bool first) {
  kind_ = Kind::sgd;
  sgd_ = options;
  momentum_ = momentum;
  fresh_ = first;
}

void Optimizer::apply(const LearnerKernels& kernels, float factor, const float* gradients, float* weights,
                      std::size_t begin, std::size_t end) const {
  const std::size_t count = end - begin;
  const auto at = [begin](float* state) { return state == nullptr ? nullptr : state + begin; };
  if (kind_ == Kind::adam) {
    const double t = static_cast<double>(*steps_) + 1.0;
    AdamStep step{};
    step.beta2 = static_cast<float>(adam_.beta2);
    step.rise1 = static_cast<float>(1.0 - adam_.beta1);
    step.rise2 = static_cast<float>(1.0 - adam_.beta2);
    step.eps = static_cast<float>(adam_.eps);
    step.step_size = static_cast<float>(adam_.lr / (1.0 - std::pow(adam_.beta1, t)));
    step.denominator = static_cast<float>(std::sqrt(1.0 - std::pow(adam_.beta2, t)));
    step.decoupled = adam_.decoupled;
    step.decay = static_cast<float>(adam_.decoupled ? 1.0 - adam_.lr * adam_.weight_decay : adam_.weight_decay);
    kernels.adam(step, factor, gradients + begin, weights + begin, at(first_), at(second_), at(max_second_), count);
  } else if (kind_ == Kind::sgd) {
    const SgdStep step{static_cast<float>(sgd_.lr),           static_cast<float>(sgd_.momentum),
                       static_cast<float>(1.0 - sgd_.dampening), static_cast<float>(sgd_.weight_decay),
                       sgd_.nesterov,                         fresh_};
    kernels.sgd(step, factor, gradients + begin, weights + begin, at(momentum_), count);
  } else {
    throw LearnerError("The optimizer has no settings yet: call set_adam or set_sgd.");
  }
}

void Optimizer::commit() {
  if (kind_ == Kind::adam) *steps_ += 1.0f;
  fresh_ = false;
}

float clip_factor(double norm, double max_norm) {
  if (!(max_norm > 0.0)) return 1.0f;
  return std::min(1.0f, static_cast<float>(max_norm) / (static_cast<float>(norm) + 1e-6f));
}

}  // namespace pearl::learner
