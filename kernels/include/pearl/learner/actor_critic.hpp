// One training step of the actor-critic algorithms for bounded actions, fused: DDPG, TD3 and SAC.
//
// All of it happens in unit scale: observations and actions are mapped to [-1, 1] on the way in, and what the actor
// says, squashed by tanh, is an action as the critics take it.
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

// Unit scale is (x - center) / half_range, feature by feature.
struct UnitScale {
  std::vector<float> center, half_range;
};

// Networks and vectors of parameters are the caller's and outlive the learner. Critics share one vector.
struct ActorCriticModel {
  const Network* actor;                 // observations to actions, or to means and log deviations
  std::vector<const Network*> critics;  // one or two: (observations, actions) to a value
  float *actor_weights, *target_actor_weights;  // the target null where the actor itself chooses the next action
  float *critic_weights, *target_critic_weights;
  UnitScale observations, actions;
};

struct ActorCriticSettings {
  bool stochastic = false;        // SAC: the actor is a normal distribution, its entropy part of the return
  double saturation_penalty = 0;  // DDPG: of the square of what exceeds 2 before tanh
  double target_noise = 0, noise_clip = 0;  // TD3: of the target action
  double log_std_low = -20, log_std_high = 2;
  double target_entropy = 0;
  double tau = 0.005;
  double max_grad_norm = 0;  // 0: no clipping
};

struct ActorCriticBatch {
  std::size_t rows;
  const float* obs;      // (rows, observation size)
  const float* actions;  // (rows, action size), in the environment's units
  const float* rewards;
  const float* next_obs;
  const float* discounts;
  const float* weights;
  const float* next_noise;  // (rows, action size) standard normal, for the next actions; null where none is used
  const float* noise;       // for the actions that the policy is judged by
};

struct ActorCriticMetrics {
  double loss, td_error, gradient_norm;  // of the critics
  double actor_gradient_norm;            // 0 where the actor stayed
};

class ActorCriticLearner {
 public:
  ActorCriticLearner(const ActorCriticModel& model, std::size_t threads);

  void set(const ActorCriticSettings& settings) { settings_ = settings; }
  bool stochastic() const { return settings_.stochastic; }
  std::size_t threads() const { return team_.size(); }
  std::size_t observation_size() const { return model_.actor->input_width(); }
  std::size_t action_size() const { return model_.actions.center.size(); }
  const ActorCriticModel& model() const { return model_; }

  // One step: critics, then, if `moves_policy`, the actor (and the temperature e^log_alpha, unless its optimizer is
  // null) against the moved critics, then, if `moves_targets`, the targets. Writes the larger |TD error| of the
  // critics to priorities `(rows,)`. Throws LearnerError where the critics' loss or gradients are not finite, with
  // everything as it was, and where the actor's are not, with only the critics moved.
  ActorCriticMetrics step(const ActorCriticBatch& batch, bool moves_policy, bool moves_targets, Optimizer& critic,
                          Optimizer& actor, Optimizer* temperature, float* log_alpha, float* priorities,
                          const PrioritiesKnown& known = {});

 private:
  struct alignas(kCacheLine) Worker {
    Worker(const ActorCriticModel& model, std::size_t panels);
    Workspace actor, next_actor;
    std::vector<Workspace> critics, next_critics;
    std::vector<float> log_prob;  // (panel,)
    double loss = 0.0, td_error = 0.0, actor_loss = 0.0, entropy_gap = 0.0;
  };
  // A worker's part of the batch, a group of panels at a time.
  struct Group {
    std::size_t first, last, panels, columns;
    bool accumulate, last_of_worker;
  };

  template <class Visit>
  void for_groups(std::size_t begin, std::size_t end, Visit visit) const;
  void critic_gradients(Worker& worker, const ActorCriticBatch& batch, const Group& group, float temperature,
                        float* gradients, float* priorities, const PrioritiesKnown& known);
  // Each worker says so once in a step.
  void priorities_written(const PrioritiesKnown& known);
  void actor_gradients(Worker& worker, const ActorCriticBatch& batch, const Group& group, float temperature,
                       float* gradients);
  void load_observations(const float* rows, std::size_t count, float* panel) const;
  // Unit actions, and for SAC their log densities, of what the actor said.
  void act(const float* outputs, const float* noise, std::size_t count, float* unit, float* log_prob) const;

  std::size_t panel() const { return kernels_.panel; }

  ActorCriticModel model_;
  const LearnerKernels& kernels_;
  ActorCriticSettings settings_;
  Team team_;
  TeamGradients critic_gradients_, actor_gradients_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<std::size_t> writing_ = 0;  // workers whose priorities are still to come
  std::size_t rows_ = 0;                  // of the last batch
};

// What a loop steps with; all of it is the caller's and outlives the algorithm.
struct ActorCriticParts {
  ActorCriticLearner& learner;
  Optimizer &critic, &actor;
  Optimizer* temperature;          // null where the temperature stays
  float* log_alpha;                // of a stochastic policy
  const std::int64_t* noise_seed;  // null where no noise is used
  std::int64_t policy_delay;       // policy and targets move in every policy_delay-th step
  std::int64_t* steps;             // trained so far
};

// Its step, for a loop. Noise is that of `fill_normal` for the seed and the count of steps: draw 0 for the next
// actions, draw 1 for those that a stochastic policy is judged by.
class ActorCriticAlgorithm : public Algorithm {
 public:
  explicit ActorCriticAlgorithm(const ActorCriticParts& parts) : parts_(parts) {}

  void item_bytes(std::size_t (&bytes)[kColumns]) const override;
  StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) override;

 private:
  const float* draw(std::uint32_t number, std::size_t rows, std::vector<float>& noise) const;

  ActorCriticParts parts_;
  std::vector<float> next_noise_, noise_;  // (rows, action size)
};

}  // namespace pearl::learner
