// torch's optimizers over one flat parameter vector, and torch's gradient clipping. Weights and the optimizer's state
// belong to the caller: torch's own tensors.
#pragma once

#include <cstddef>

#include "pearl/learner/kernels.hpp"

namespace pearl::learner {

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  // AdamW
};

struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
};

class Optimizer {
 public:
  // first, second and max_second (AMSGrad only, else null) `(parameters,)`; steps: the count of steps.
  void set_adam(const AdamOptions& options, float* first, float* second, float* max_second, float* steps);
  // momentum `(parameters,)`, null without momentum; if `first`, the next step overwrites it without reading it.
  void set_sgd(const SgdOptions& options, float* momentum, bool first);

  // Moves weights [begin, end) by `gradients * factor`; commit() then counts the step.
  void apply(const LearnerKernels& kernels, float factor, const float* gradients, float* weights, std::size_t begin,
             std::size_t end) const;
  void commit();

 private:
  enum class Kind { none, adam, sgd };
  Kind kind_ = Kind::none;
  AdamOptions adam_{};
  SgdOptions sgd_{};
  float *first_ = nullptr, *second_ = nullptr, *max_second_ = nullptr, *steps_ = nullptr;
  float* momentum_ = nullptr;
  bool fresh_ = false;
};

// The factor of torch.nn.utils.clip_grad_norm_ for gradients of this norm; 1 if `max_norm` is 0.
float clip_factor(double norm, double max_norm);

}  // namespace pearl::learner
