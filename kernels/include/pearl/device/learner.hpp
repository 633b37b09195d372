// The Learner on a parallel device: networks of linear layers, trained by DQN, DDPG, TD3 and SAC in a few launches per
// step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pearl/device/block_memory.hpp"
#include "pearl/device/network_source.hpp"
#include "pearl/device/queue.hpp"
#include "pearl/learner/network.hpp"
#include "pearl/tape.hpp"

namespace pearl::device {

// Of each column of a transition: obs, action, reward, next_obs, discount.
using RowBytes = std::array<std::size_t, 5>;

// The model to train. The caller owns the parameters, which lie in Placement::shared memory and outlive the learner.
struct LearnerModel {
  bool actor_critic = false;
  std::vector<NetworkSource> networks;  // DQN: one; else the actor, then one or two critics that share one vector
  float* parameters[4] = {};            // tape::Vector; null for a target that does not exist
  std::size_t counts[4] = {};
  std::vector<float> scales;  // centers and half ranges: of observations, then of actions
  std::size_t observation_size = 0, action_size = 0;
  float* log_alpha = nullptr;  // SAC

  RowBytes row_bytes() const {
    const std::size_t observation = observation_size * sizeof(float);
    return {observation, actor_critic ? action_size * sizeof(float) : sizeof(std::int64_t), sizeof(float), observation,
            sizeof(float)};
  }
};

struct LearnerSettings {
  bool double_q = false, stochastic = false;
  float saturation_penalty = 0, target_noise = 0, noise_clip = 0, log_std_low = -20, log_std_high = 2;
  float target_entropy = 0, max_grad_norm = 0;
  double tau = 1.0;                  // below 1: how far the targets move in each step that moves them
  std::int64_t target_interval = 1;  // for tau = 1: steps between copies to the targets
  std::int64_t policy_delay = 1;     // TD3: steps between moves of policy and targets
  std::uint64_t noise_seed = 0;
};

// How a step is divided: rows of lanes that share the neurons of a layer (where lanes are threads, beyond 16 in several
// blocks), and the columns of a matrix that a work-group moves, a multiple of tape::kLanes. 0: chosen for the device. And
// how many bytes of their own memory blocks may use at most, where they have some; -1: all. `branches`: passes that do not
// wait for each other run side by side, each in a block, where one block holds all that a step needs.
struct LearnerCut {
  int slices = 0, columns_per_tile = 0, block_bytes = -1;
  bool branches = true;
};

struct OptimizerSettings {
  bool adam = true, decoupled = false, nesterov = false, fresh = false;
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, decay = 0, momentum = 0, dampening = 0;
  float *first = nullptr, *second = nullptr, *max_second = nullptr;  // shared memory, as the parameters
  float* steps = nullptr;                                            // host memory; Adam
};

// The kernels' view of an optimizer, and of its next step after `before` steps that are already enqueued.
tape::Rule rule_of(const OptimizerSettings& settings);
tape::Optimizer on_device(const OptimizerSettings& settings);
tape::StepArguments next_step(const OptimizerSettings& settings, std::int64_t before);

// Further moves of step number `step`, from 0, which always moves the weights of DQN or of the critics.
struct Moves {
  bool policy;
  float target;  // how far the targets move
};
Moves moves_of(const LearnerSettings& settings, std::int64_t step);

// Copies the settings that kernels read to their context.
template <class Context>
void copy_settings(const LearnerSettings& settings, Context& context) {
  context.saturation_penalty = settings.saturation_penalty;
  context.target_noise = settings.target_noise;
  context.noise_clip = settings.noise_clip;
  context.log_std_low = settings.log_std_low;
  context.log_std_high = settings.log_std_high;
  context.target_entropy = settings.target_entropy;
  context.max_grad_norm = settings.max_grad_norm;
  context.noise_seed = settings.noise_seed;
}

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

// Memory for a batch from the host. Its addresses change only with the number of rows.
class OwnBatch {
 public:
  DeviceBatch of(DeviceQueue& queue, std::size_t rows, const RowBytes& bytes);

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
  using Cut = LearnerCut;
  using Queue = DeviceQueue;

  // Throws LearnerError for a network that the kernels cannot run, or a cut that does not fit them.
  DeviceLearner(std::shared_ptr<DeviceQueue> queue, LearnerModel model, LearnerCut cut);

  // While no step is enqueued.
  void set(const LearnerSettings& settings);
  void set_optimizer(Which which, const OptimizerSettings& settings);
  // The next steps train on the `rows` transitions in `batch`.
  void set_batch(std::size_t rows, const DeviceBatch& batch);
  DeviceBatch own_batch(std::size_t rows);

  // Works out the steps from number `step`, from 0, on, at most kMostAhead; while none is enqueued.
  void prepare(std::int64_t step, std::size_t count);
  // Enqueues one of these, from 0. Returns at once.
  void launch(std::size_t place);
  // Enqueues step number `step` alone.
  void launch_step(std::int64_t step) {
    prepare(step, 1);
    launch(0);
  }
  // Which launches `count` prepared steps consist of: recorded ones do for other steps of the same kind.
  struct Kind {
    std::uint64_t build;   // changes with the memory and the kernels that steps use
    std::uint64_t policy;  // a bit for each step that moves the policy
    bool operator==(const Kind&) const = default;
  };
  Kind kind(std::size_t count) const;
  // Where kernels note that a step has failed: not 0 then.
  const std::int32_t* failure() const { return &outcome_.there()->failure; }
  // Waits for all steps launched since the last call. Throws LearnerError where one failed; the steps after it have
  // moved no weight.
  LearnerMetrics finish();

  RowBytes row_bytes() const { return model_.row_bytes(); }
  DeviceQueue& queue() { return *queue_; }
  // How many blocks run a tape of their own each, for the last batch; 1: all run one.
  std::size_t branches() const { return branches_; }

 private:
  struct Phase {
    DeviceArray<tape::Instruction> tape;
    DeviceArray<tape::Tile> tiles;
  };
  struct Program;
  struct Builder;

  std::shared_ptr<const Kernels> compile(int rule);
  std::size_t block_bytes() const;
  void build(std::size_t rows);
  std::vector<std::vector<tape::Instruction>> plan_tapes(const std::vector<Program>& programs, std::size_t groups,
                                                         std::size_t features);
  Phase upload(const std::vector<tape::Instruction>& tape, const std::vector<tape::Tile>& tiles);
  void run(const Phase& phase, Which which, std::size_t place);
  bool has_temperature() const { return model_.log_alpha != nullptr && movers_[kTemperature] != nullptr; }

  const std::shared_ptr<DeviceQueue> queue_;
  LearnerModel model_;
  LearnerSettings settings_;
  OptimizerSettings optimizers_[3];
  std::int64_t launched_[3] = {};  // steps of each optimizer since the last finish()
  std::shared_ptr<const Kernels> kernels_;
  std::shared_ptr<const Kernels> movers_[3];  // compiled for each optimizer's rule
  LearnerCut cut_;
  int rows_of_block_ = 1;  // and how many blocks run a tape together, and at most; 0: given
  std::size_t cluster_ = 1, most_cluster_ = 0;
  std::size_t branches_ = 1;
  BlockMemory memory_;
  std::size_t rows_ = 0, groups_ = 0;
  std::uint64_t build_ = 0;
  std::int64_t first_ = 0;  // number of the first prepared step
  // What the host writes before steps are launched.
  struct Arguments {
    tape::Context context;
    tape::Optimizer optimizers[3];
    tape::StepNumbers steps[kMostAhead];
  };
  PassedArray<Arguments> arguments_;
  PassedArray<tape::Outcome> outcome_;
  DeviceArray<tape::Sums> sums_;
  DeviceArray<float> arena_, kept_rows_, gradients_[2], squares_, scales_;
  std::vector<Phase> phases_;
  OwnBatch own_;
};

}  // namespace pearl::device
