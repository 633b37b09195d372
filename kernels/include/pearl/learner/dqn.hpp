// One training step of deep Q-learning, fused: targets, loss, gradients, clipping, weights, target network. Of each
// action, a network gives a value or quantiles of the value's distribution (QR-DQN), those of an action in a row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "pearl/learner/network.hpp"
#include "pearl/learner/team_learner.hpp"

namespace pearl::learner {

enum class Loss { huber, mse };  // smooth L1 with its knee at 1, or the squared error (not its half); of values

struct DqnSettings {
  bool double_q = true;  // the online network chooses the next action, the target network judges it
  Loss loss = Loss::huber;
  double max_grad_norm = 0.0;                // 0: no clipping
  double tau = 1.0;                          // below 1: Polyak's rate, each step
  std::uint64_t target_update_interval = 1;  // with tau = 1: steps between hard copies
};

struct alignas(kCacheLine) DqnWorker : WorkerSums {
  DqnWorker(const Network& network, std::size_t panels, std::size_t quantiles);
  Workspace training, next;
  AlignedArray<float> next_values;  // (panels, outputs, panel): of the target network
  // With quantiles, of a panel: the next actions' values; the quantiles of the actions taken, of their targets, and the
  // slopes of the former; two rows of sums.
  AlignedArray<float> means, taken, targets, slopes, sums;
};

// Used from one thread at a time. The network and all vectors of parameters are the caller's and outlive it.
class DqnLearner : public TeamLearner<DqnWorker> {
 public:
  // `quantiles` of each action, or 0: a value. Throws LearnerError for outputs that are no multiple of it.
  DqnLearner(const Network& network, float* online, float* target, std::size_t threads, std::size_t quantiles = 0);

  void set(const DqnSettings& settings) { settings_ = settings; }
  const Network& network() const { return network_; }
  std::size_t actions() const { return network_.output_width() / std::max<std::size_t>(1, quantiles_); }

  // Step number `step`, counted from 1; writes |TD error| to priorities `(rows,)`, with quantiles that of their means.
  // Throws LearnerError, with weights and optimizer unchanged, for an action out of range and for a loss or gradient that
  // is not finite. With masks, the next action is the best of those that they allow.
  StepMetrics step(const Batch& batch, std::uint64_t step, Optimizer& optimizer, float* priorities,
                   const PrioritiesKnown& known = {});

 private:
  void train(DqnWorker& worker, const Batch& batch, std::size_t begin, std::size_t end, float* gradients,
             float* priorities, const PrioritiesKnown& known);
  void evaluate_next(DqnWorker& worker, std::size_t panels, std::size_t count, std::size_t last_columns);
  void differentiate(DqnWorker& worker, const Batch& batch, std::size_t begin, std::size_t panel, std::size_t count,
                     float* priorities);
  void differentiate_quantiles(DqnWorker& worker, const Batch& batch, std::size_t begin, std::size_t panel,
                               std::size_t count, float* priorities);

  const Network& network_;
  float *online_, *target_;
  const std::size_t quantiles_;
  DqnSettings settings_;
  TeamGradients gradients_;
};

// A DqnLearner as a loop's Algorithm. Learner, optimizer and the count of steps are the caller's and outlive it.
class DqnAlgorithm : public Algorithm {
 public:
  // `masked`: its transitions have the mask of the next observation.
  DqnAlgorithm(DqnLearner& learner, Optimizer& optimizer, std::int64_t* steps, bool masked)
      : learner_(learner), optimizer_(optimizer), steps_(steps), masked_(masked) {}

  std::vector<std::size_t> item_bytes() const override;
  StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) override;

 private:
  DqnLearner& learner_;
  Optimizer& optimizer_;
  std::int64_t* steps_;
  const bool masked_;
};

}  // namespace pearl::learner
