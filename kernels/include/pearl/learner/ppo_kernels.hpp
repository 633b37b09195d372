// The loops over the rows of PPO's minibatches, one table of them per instruction set. Arrays hold a panel of rows, as
// kernels.hpp says. The first `count` of a panel's (panel,) columns are rows; the content of the others has no effect.
#pragma once

#include <cstddef>

namespace pearl::learner {

// Actions of normal distributions, `size` of each row. log p = -sum of (d_j^2 / 2 + s_j + log(2 pi) / 2) with the
// distances d_j = (a_j - mean_j) exp(-s_j).
struct NormalRows {
  std::size_t size;
  const float *actions, *means;                      // (size, panel)
  const float *inverse_deviations, *log_deviations;  // (size,): exp(-s_j), s_j
};

// One part of categorical actions.
struct SoftmaxRows {
  std::size_t choices;
  const float* logits;                // (choices, panel)
  const float *log_sums, *entropies;  // (panel,)
};

// The parts of a loss, which is the mean over `1 / share` rows.
struct PpoPolicyLoss {
  float share, clip_range;
};
struct PpoValueLoss {
  float factor;      // 2 * value_coefficient * share
  float clip_range;  // 0: values are not clipped
};

// (panel,) each.
struct PpoPolicyRows {
  const float *log_probs, *old_log_probs, *advantages;
};
struct PpoValueRows {
  const float *values, *old_values, *returns;
};

struct PpoSums {
  double policy_loss = 0.0, value_loss = 0.0, divergence = 0.0, clipped = 0.0;
};

struct PpoKernels {
  // (size, panel) distances, (panel,) log probabilities.
  void (*normal_log_probs)(const NormalRows& rows, float* distances, float* log_probs);
  // From the loss's slopes by the log probabilities: those by means, in the place of the distances, and, added up over
  // the rows, by log deviations: log p has the derivatives d_j exp(-s_j) and d_j^2 - 1.
  void (*normal_slopes)(const NormalRows& rows, const float* slopes, std::size_t count, float* distances,
                        double* deviation_slopes);

  // Of logits l_k: the probabilities p_k = exp(l_k - log_sum) and the entropies H = -sum of p_k (l_k - log_sum), of
  // which it returns the sum.
  double (*softmax)(const float* logits, std::size_t choices, std::size_t count, float* probabilities, float* log_sums,
                    float* entropies);
  // The slopes by logits, in the place of the probabilities, as if no choice were made: by l_k, the log probability of
  // choice a has the derivative [k = a] - p_k, and H has -p_k (log p_k + H). `by_entropy`: the loss's slope by H.
  void (*softmax_slopes)(const SoftmaxRows& rows, const float* slopes, float by_entropy, std::size_t count,
                         float* probabilities);

  // The loss's slopes by log probabilities, and by values; PpoLearner says what the loss is. They add to the sums.
  void (*policy_slopes)(const PpoPolicyLoss& loss, const PpoPolicyRows& rows, std::size_t count, float* slopes,
                        PpoSums& sums);
  void (*value_slopes)(const PpoValueLoss& loss, const PpoValueRows& rows, std::size_t count, float* slopes,
                       PpoSums& sums);
};

}  // namespace pearl::learner
