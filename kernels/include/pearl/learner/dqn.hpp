// One training step of deep Q-learning, fused: targets, loss, gradients, clipping, weights, target network.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pearl/learner/algorithm.hpp"
#include "pearl/learner/gradients.hpp"
#include "pearl/learner/network.hpp"
#include "pearl/learner/optimizer.hpp"
#include "pearl/learner/team.hpp"

namespace pearl::learner {

enum class Loss { huber, mse };  // smooth L1 with its knee at 1, or the squared error (not its half)

struct DqnSettings {
  bool double_q = true;  // the online network chooses the next action, the target network judges it
  Loss loss = Loss::huber;
  double max_grad_norm = 0.0;                // 0: no clipping
  double tau = 1.0;                          // below 1: Polyak's rate, each step
  std::uint64_t target_update_interval = 1;  // with tau = 1: steps between hard copies
};

// Used from one thread at a time. The network and all vectors of parameters are the caller's and outlive it.
class DqnLearner {
 public:
  DqnLearner(const Network& network, float* online, float* target, std::size_t threads);

  void set(const DqnSettings& settings) { settings_ = settings; }
  const Network& network() const { return network_; }
  std::size_t threads() const { return team_.size(); }

  // The step of number `step`, counted from 1; writes |TD error| to priorities `(rows,)`. Throws LearnerError, with
  // weights and optimizer untouched, for an action out of range and for a loss or gradient that is not finite.
  StepMetrics step(const Batch& batch, std::uint64_t step, Optimizer& optimizer, float* priorities,
                   const PrioritiesKnown& known = {});

 private:
  struct alignas(kCacheLine) Worker {
    Worker(const Network& network, std::size_t panels);
    Workspace training, next;
    AlignedArray<float> next_values;  // (panels, outputs, panel): of the target network
    double loss = 0.0, td_error = 0.0;
  };

  void train(Worker& worker, const Batch& batch, std::size_t begin, std::size_t end, float* gradients,
             float* priorities, const PrioritiesKnown& known);
  // Each worker says so once in a step.
  void priorities_written(const PrioritiesKnown& known);
  void evaluate_next(Worker& worker, const float* rows, std::size_t panel, std::size_t count, std::size_t columns);
  void differentiate(Worker& worker, const Batch& batch, std::size_t begin, std::size_t panel, std::size_t count,
                     float* priorities);

  const Network& network_;
  float *online_, *target_;
  DqnSettings settings_;
  Team team_;
  TeamGradients gradients_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<std::size_t> writing_ = 0;  // workers whose priorities are still to come
  std::size_t rows_ = 0;                  // of the last batch
};

// Its step, for a loop. Learner, optimizer and the count of steps are the caller's and outlive it.
class DqnAlgorithm : public Algorithm {
 public:
  DqnAlgorithm(DqnLearner& learner, Optimizer& optimizer, std::int64_t* steps)
      : learner_(learner), optimizer_(optimizer), steps_(steps) {}

  void item_bytes(std::size_t (&bytes)[kColumns]) const override;
  StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) override;

 private:
  DqnLearner& learner_;
  Optimizer& optimizer_;
  std::int64_t* steps_;
};

}  // namespace pearl::learner
