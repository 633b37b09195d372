// Training by proximal policy optimization on a rollout: epochs of minibatches, each one a fused step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/learner/action_distribution.hpp"
#include "pearl/learner/team_learner.hpp"

namespace pearl::learner {

struct PpoSettings {
  double clip_range = 0.2;
  double value_clip_range = 0.0;  // 0: values are not clipped
  double value_coefficient = 0.5;
  double entropy_coefficient = 0.0;
  double max_grad_norm = 0.0;  // 0: no clipping
  double target_kl = 0.0;      // 0: never stop early
  bool normalize_advantages = true;
};

// Columns of a rollout; every one has `rows` rows.
struct Rollout {
  std::size_t rows;
  const float* obs;                               // (rows, inputs)
  const void* actions;                            // (rows, size): std::int64_t of parts, else float
  const float *log_probs, *advantages, *returns;  // (rows,)
  const std::uint8_t* masks = nullptr;  // (rows, outputs) of parts: 0 where a choice is forbidden; null: all allowed
  const float* values = nullptr;        // (rows,), from which value clipping counts; null: returns less advantages
};

// Which rows are trained on, how often and in which order: that of `shuffle` with `seed` and the count of steps so far.
struct PpoSchedule {
  const std::int64_t* rows;  // (count,) of the rollout; null: the first `count`
  std::size_t count;
  std::size_t epochs, batch_size;
  std::uint64_t seed;

  std::int64_t row(std::size_t i) const { return rows == nullptr ? static_cast<std::int64_t>(i) : rows[i]; }
};

// Means over the minibatches. The one that ends training early counts, but for the gradient norm, as it makes no step.
struct PpoMetrics {
  double policy_loss = 0.0, value_loss = 0.0, entropy = 0.0, approximate_kl = 0.0, clip_fraction = 0.0;
  double gradient_norm = 0.0;  // before clipping
  std::size_t steps = 0, epochs = 0;  // made, begun
};

struct alignas(kCacheLine) PpoWorker : WorkerSums, PpoSums {
  PpoWorker(const PolicyAndValue& networks, std::size_t panels);

  Workspace policy, value;
  double entropy = 0.0;
  std::vector<float> advantage;  // (rows + panel,) of the minibatch, normalised if they are to be
  // Of a panel's rows.
  std::vector<float> obs;                                         // (panel, inputs)
  std::vector<float> old_log_prob, old_value, target;  // (panel,)
  std::vector<float> log_prob, slope;        // (panel,): of the actions, and the loss's derivative by it
  std::vector<float> log_sum, part_entropy;  // (parts, panel)
  std::vector<float> action;                 // (size, panel) of a normal distribution
  std::vector<float> inverse_deviation;      // (size,)
  std::vector<double> log_std_slope;         // (size,)
};

// Used from one thread at a time. Networks and weights are the caller's and outlive it.
class PpoLearner : public TeamLearner<PpoWorker> {
 public:
  PpoLearner(const PolicyAndValue& networks, float* weights, std::size_t threads);

  void set(const PpoSettings& settings) { settings_ = settings; }
  const PolicyAndValue& networks() const { return networks_; }

  // Trains and adds to `steps` with every step. Throws LearnerError, before the first step, for rows and actions out of
  // range; and for a loss or gradient that is not finite, with weights and optimizer as the step before has left them.
  PpoMetrics train(const Rollout& rollout, const PpoSchedule& schedule, Optimizer& optimizer, std::int64_t* steps);

 private:
  struct Minibatch {
    const Rollout& rollout;
    const std::int64_t* rows;
    std::size_t count;
  };

  void check(const Rollout& rollout, const PpoSchedule& schedule) const;
  bool step(const Minibatch& batch, Optimizer& optimizer, PpoMetrics& sums);
  void prepare(PpoWorker& worker, const Minibatch& batch) const;
  void compute_gradients(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t end,
                         float* gradients);
  void load(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel, std::size_t count) const;
  void differentiate_policy(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                            std::size_t count) const;
  void differentiate_values(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                            std::size_t count) const;
  NormalRows normal_rows(PpoWorker& worker, std::size_t panel) const;
  void evaluate_parts(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                      std::size_t count) const;
  void evaluate_normal(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                       std::size_t count) const;
  void part_slopes(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                   std::size_t count) const;
  void set_forbidden(const Minibatch& batch, std::size_t begin, std::size_t count, float value, float* outputs) const;
  static float share(const Minibatch& batch) { return 1.0f / static_cast<float>(batch.count); }
  float entropy_slope(const Minibatch& batch) const {
    return -static_cast<float>(settings_.entropy_coefficient / static_cast<double>(batch.count));
  }

  PolicyAndValue networks_;
  float* weights_;
  PpoSettings settings_;
  TeamGradients gradients_;
  bool shared_;                      // the networks have layers in common: their gradients add up
  std::vector<std::int64_t> order_;  // the rows of an epoch
};

}  // namespace pearl::learner
