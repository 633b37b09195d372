// One training step of the actor-critic algorithms for bounded actions, fused: DDPG, TD3, SAC, REDQ, DroQ and TQC.
//
// Everything is in unit scale: observations and actions are mapped to [-1, 1] on the way in, and tanh of the actor's
// output is an action as the critics take it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/learner/network.hpp"
#include "pearl/learner/team_learner.hpp"

namespace pearl::learner {

// Unit scale is (x - center) / half_range, feature by feature.
struct UnitScale {
  std::vector<float> center, half_range;
};

// Networks and vectors of parameters are the caller's and outlive the learner. Critics share one vector.
struct ActorCriticModel {
  const Network* actor;                 // observations to actions, or to means and log deviations
  // One, two or an ensemble: (observations, actions) to a value, or all to as many quantiles of its distribution.
  std::vector<const Network*> critics;
  float *actor_weights, *target_actor_weights;  // target: null if the actor itself chooses the next action
  float *critic_weights, *target_critic_weights;
  UnitScale observations, actions;
};

struct ActorCriticSettings {
  bool stochastic = false;        // SAC: the actor gives a normal distribution; its entropy is part of the return
  double saturation_penalty = 0;  // DDPG: weight of the squared excess over 2 before tanh
  double target_noise = 0, noise_clip = 0;  // TD3: of the target action
  double log_std_low = -20, log_std_high = 2;
  double target_entropy = 0;
  double tau = 0.005;
  double max_grad_norm = 0;  // 0: no clipping
  // REDQ: targets take the smallest value of so many critics, drawn for each step; the actor follows the mean of all
  // critics. 0: all of the one or two critics judge both, by the smaller value.
  std::size_t target_critics = 0;
  // TQC: of the quantiles of all critics that judge the targets, so many for each critic, the largest, do not count.
  std::size_t dropped_quantiles = 0;
};

// `actions` (rows, action size) in the environment's units; noise (rows, action size) standard normal.
struct ActorCriticBatch : Batch {
  const float* next_noise;  // for the next actions; null if unused
  const float* noise;       // for the actions by which the policy is judged
  std::uint64_t seed = 0, step = 0;  // of an ensemble: what its random choices depend on
};

// The critics' metrics.
struct ActorCriticMetrics : StepMetrics {
  double actor_gradient_norm;  // 0 if the actor did not move
};

struct alignas(kCacheLine) ActorCriticWorker : WorkerSums {
  ActorCriticWorker(const ActorCriticModel& model, std::size_t panels);
  Workspace actor, next_actor;
  std::vector<Workspace> critics, next_critics;
  std::vector<float> log_prob;  // (panels, panel)
  std::vector<float> noise;     // (panels, action size, panel), if the policy is stochastic
  std::vector<float> judgements;  // of a panel's transitions, by all critics that judge
  // With quantiles, of a panel: those of the targets by all critics; a row of losses, then one of sums.
  AlignedArray<float> atoms, sums;
  std::vector<float*> slopes;   // of the outputs of each critic in a panel
  std::vector<const float*> values, judged;  // outputs of each critic, and of the targets that judge
  double actor_loss = 0.0, entropy_gap = 0.0;
};

class ActorCriticLearner : public TeamLearner<ActorCriticWorker> {
 public:
  ActorCriticLearner(const ActorCriticModel& model, std::size_t threads);

  // Throws LearnerError for more than two critics, or critics of quantiles, without `target_critics`, for more of these
  // than critics, and for dropping all quantiles.
  void set(const ActorCriticSettings& settings);
  bool stochastic() const { return settings_.stochastic; }
  bool ensemble() const { return settings_.target_critics > 0; }
  std::size_t observation_size() const { return model_.actor->input_width(); }
  std::size_t action_size() const { return model_.actions.center.size(); }
  std::size_t quantiles() const { return model_.critics[0]->output_width(); }  // 1: a value
  const ActorCriticModel& model() const { return model_; }

  // One step: moves the critics; then, if `moves_policy`, the actor against the moved critics, and the temperature
  // e^log_alpha unless its optimizer is null; then, if `moves_targets`, the targets. Writes the critics' larger |TD error|
  // to priorities `(rows,)`. Throws LearnerError if the critics' loss or gradients are not finite (nothing has changed),
  // or the actor's (only the critics have moved).
  ActorCriticMetrics step(const ActorCriticBatch& batch, bool moves_policy, bool moves_targets, Optimizer& critic,
                          Optimizer& actor, Optimizer* temperature, float* log_alpha, float* priorities,
                          const PrioritiesKnown& known = {});

 private:
  // A group of panels of a worker's part of the batch.
  struct Group {
    std::size_t first, last, panels, last_columns;
    bool accumulate, last_of_worker;
  };

  template <class Visit>
  void for_groups(std::size_t begin, std::size_t end, Visit visit) const;
  void critic_gradients(ActorCriticWorker& worker, const ActorCriticBatch& batch, const Group& group,
                        float temperature, float* gradients, float* priorities, const PrioritiesKnown& known);
  void actor_gradients(ActorCriticWorker& worker, const ActorCriticBatch& batch, const Group& group, float temperature,
                       float* gradients);
  template <class Visit>
  void for_panels(const Group& group, Visit visit) const;
  void of_critics(ActorCriticWorker& worker, std::size_t critics, std::size_t p) const;
  // The critics' slopes, the losses and the priorities of panel p, whose targets' values `worker.judged` points to.
  void differentiate(ActorCriticWorker& worker, const ActorCriticBatch& batch, std::size_t p, std::size_t first,
                     std::size_t count, float temperature, float* priorities);
  void differentiate_quantiles(ActorCriticWorker& worker, const ActorCriticBatch& batch, std::size_t p,
                               std::size_t first, std::size_t count, float temperature, float* priorities);
  void load_observations(const float* rows, std::size_t count, float* panel) const;
  // Panel p's `count` outputs of the actor to unit actions and, for SAC, their log densities.
  void act(ActorCriticWorker& worker, std::size_t p, const float* outputs, const float* noise, std::size_t count,
           float* unit) const;

  std::size_t panel() const { return kernels_.panel; }
  // A pass of a batch through critic `critic`: 0 by the targets, 1 by the critics, 2 to judge the policy.
  DropoutPass pass(const ActorCriticBatch& batch, std::uint32_t number, std::size_t critic, std::size_t first) const {
    return {ensemble(), batch.seed, batch.step, number << 16 | static_cast<std::uint32_t>(critic) << 8, first};
  }

  ActorCriticModel model_;
  ActorCriticSettings settings_;
  std::vector<std::uint32_t> judges_;  // the critics whose targets judge the next actions in this step
  TeamGradients critic_gradients_, actor_gradients_;
};

// The parts of an ActorCriticAlgorithm; all are the caller's and outlive it.
struct ActorCriticParts {
  ActorCriticLearner& learner;
  Optimizer &critic, &actor;
  Optimizer* temperature;          // null if the temperature stays
  float* log_alpha;                // of a stochastic policy
  const std::int64_t* noise_seed;  // null if no noise is used
  std::int64_t policy_delay;       // the policy moves in every policy_delay-th step, targets too but for an ensemble
  std::int64_t* steps;             // trained so far
};

// An ActorCriticLearner as a loop's Algorithm. Noise is from `fill_normal` with the seed and the count of steps: draw 0
// for the next actions, draw 1 for the actions by which a stochastic policy is judged.
class ActorCriticAlgorithm : public Algorithm {
 public:
  explicit ActorCriticAlgorithm(const ActorCriticParts& parts) : parts_(parts) {}

  std::vector<std::size_t> item_bytes() const override;
  StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) override;

 private:
  const float* draw(std::uint32_t number, std::size_t rows, std::vector<float>& noise) const;

  ActorCriticParts parts_;
  std::vector<float> next_noise_, noise_;  // (rows, action size)
};

}  // namespace pearl::learner
