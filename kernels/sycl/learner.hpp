// The Learner on a SYCL device: networks of linear layers, trained by DQN, DDPG, TD3 and SAC in a few launches per step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device_queue.hpp"
#include "network_source.hpp"
#include "pearl/learner/network.hpp"
#include "pearl/tape.hpp"

namespace pearl::device {

// What is trained. Parameters are the caller's, in memory that host and device see (Placement::shared), and outlive it.
struct LearnerModel {
  bool actor_critic = false;
  std::vector<NetworkSource> networks;  // DQN: one; else the actor, then one or two critics that share one vector
  float* parameters[4] = {};            // tape::Vector; a target may be null where there is none
  std::size_t counts[4] = {};
  std::vector<float> scales;  // centers and half ranges: of observations, then of actions
  std::size_t observation_size = 0, action_size = 0;
  float* log_alpha = nullptr;  // SAC
};

struct LearnerSettings {
  bool double_q = false, stochastic = false;
  float saturation_penalty = 0, target_noise = 0, noise_clip = 0, log_std_low = -20, log_std_high = 2;
  float target_entropy = 0, max_grad_norm = 0;
  double tau = 1.0;                    // below 1: the targets move so far in each step that moves them
  std::int64_t target_interval = 1;    // else they are copied in every such step
  std::int64_t policy_delay = 1;       // TD3: policy and targets move in every such step
  std::uint64_t noise_seed = 0;
};

// How a step is cut up: PEARL_SLICES of the kernels, and how many columns of a matrix a work-group moves, a multiple of
// tape::kLanes. 0: what suits the device.
struct LearnerCut {
  int slices = 0, columns_per_tile = 0;
};

struct OptimizerSettings {
  bool adam = true, decoupled = false, nesterov = false, fresh = false;
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, decay = 0, momentum = 0, dampening = 0;
  float *first = nullptr, *second = nullptr, *max_second = nullptr;  // shared memory, as the parameters
  float* steps = nullptr;                                            // host memory; Adam
};

// What kernels are told of an optimizer, and of its next step, where `before` steps are under way already.
tape::Rule rule_of(const OptimizerSettings& settings);
tape::Optimizer on_device(const OptimizerSettings& settings);
tape::StepArguments next_step(const OptimizerSettings& settings, std::int64_t before);

// Which weights the `step`-th step moves, from 0, beside the critics' or DQN's: the policy's, and how far the targets.
struct Moves {
  bool policy;
  float target;
};
Moves moves_of(const LearnerSettings& settings, std::int64_t step);

[[noreturn]] void throw_diverged(const std::string& device);
[[noreturn]] void throw_wrong_action(std::size_t actions, std::size_t position);

struct LearnerMetrics {
  double loss = 0, td_error = 0, gradient_norm = 0, actor_gradient_norm = 0;  // means; norms 0 without clipping
  std::int64_t steps = 0, actor_steps = 0;
};

// The batch on the device; see tape::Context.
struct DeviceBatch {
  const void* columns[5] = {};
  const float* weights = nullptr;
  float* priorities = nullptr;
};

// Memory for a batch of the host's; its addresses stay until the count of rows changes.
class OwnBatch {
 public:
  DeviceBatch of(DeviceQueue& queue, std::size_t rows, std::size_t observation_size, std::size_t action_bytes);

 private:
  std::size_t rows_ = 0;
  DeviceArray<char> columns_[5];
  DeviceArray<float> weights_, priorities_;
};

// Which optimizer.
enum LearnerWhich { kMain = 0, kActor = 1, kTemperature = 2 };

class DeviceLearner {
 public:
  using Which = LearnerWhich;

  // Throws LearnerError naming what does not fit.
  DeviceLearner(DeviceQueue& queue, LearnerModel model, LearnerCut cut = {});

  // While nothing is under way.
  void set(const LearnerSettings& settings);
  void set_optimizer(Which which, const OptimizerSettings& settings);
  // Steps from now on are of `rows` transitions, which lie in `batch`.
  void set_batch(std::size_t rows, const DeviceBatch& batch);
  DeviceBatch own_batch(std::size_t rows);

  // Enqueues one step, the `step`-th of all, from 0. Returns at once.
  void launch(std::int64_t step);
  // Waits for all steps launched since the last time. Throws LearnerError where one failed: none after it has moved any
  // weight.
  LearnerMetrics finish();

  std::size_t observation_size() const { return model_.observation_size; }
  std::size_t action_bytes() const;
  DeviceQueue& queue() { return queue_; }

 private:
  struct Phase {
    DeviceArray<tape::Instruction> tape;
    DeviceArray<tape::Tile> tiles;
  };
  struct Builder;

  std::shared_ptr<const Kernels> compile(int rule);
  void build(std::size_t rows);
  Phase upload(const std::vector<tape::Instruction>& tape, const std::vector<tape::Tile>& tiles);
  void run(const Phase& phase, bool policy, Which which, std::int64_t step, float target);
  tape::StepArguments advance(Which which);

  DeviceQueue& queue_;
  LearnerModel model_;
  LearnerSettings settings_;
  OptimizerSettings optimizers_[3];
  std::int64_t launched_[3] = {};  // steps of each optimizer since the last finish()
  std::shared_ptr<const Kernels> kernels_;
  std::shared_ptr<const Kernels> movers_[3];  // compiled for each optimizer's rule
  LearnerCut cut_;
  std::size_t rows_ = 0, groups_ = 0;
  DeviceArray<tape::Context> context_;
  DeviceArray<tape::Optimizer> device_optimizers_;
  DeviceArray<tape::Sums> sums_;
  DeviceArray<float> arena_, kept_rows_, gradients_[2], squares_, scales_, totals_;
  std::vector<Phase> phases_;
  OwnBatch own_;
};

}  // namespace pearl::device
