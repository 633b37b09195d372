// A training step as a tape: the list of operations that one work-group runs on its 16 transitions, from the batch to
// the slopes of every layer; and the tiles of weights to move. Both are data: one compiled kernel trains every network
// with every algorithm. The host writes them, the kernels read them.
//
// Values are stored feature by feature: in a work-group, feature f of transition c is at f * 16 + c. Each lane has its own
// transition, and lanes never wait for each other.
#pragma once

#include <cstdint>

namespace pearl::tape {

inline constexpr int kLanes = 16;      // transitions of a work-group
inline constexpr int kTileRows = 8;    // neurons of a tile of weights, where lanes are parts of a vector
inline constexpr int kTileRowsOfThreads = 16;
inline constexpr int kNone = -1;

enum class Operation : std::int32_t {
  load,              // column of the batch to `out`, mapped to unit scale if `in` is given
  linear,            // out = activation(weight x + bias)
  relu,
  tanh,
  layer_norm,        // `other`: mean and 1 / deviation
  combine,           // out = in + scalar * other, each of width 1 or `out_width`
  mean,
  slope_activation,  // out *= derivative of `activation` at value `in`
  slope_linear,      // out = [out] + weight^T in, times the derivative of `activation` at value `other`
  slope_relu,        // out = [out] + in where value `other` is above 0
  slope_tanh,
  slope_layer_norm,  // in: slope of the result; other: statistics; extra: input; extra2: slope times unit, for the gain
  slope_combine,     // out = [out] + scalar * in, summed over features where `out` has one
  slope_mean,
  dqn_loss,          // in: values; other: the target's next values; extra: values that choose the next action; out: slopes
  act,               // in: the actor's outputs; out: unit actions; extra: log densities
  critic_loss,       // in, extra: values; other, extra2: next values; extra3: log densities; out, out2: slopes
  policy_loss,       // in, extra: values; other: log densities; out, out2: slopes
  slope_act,         // in, extra: slopes of unit actions; other: the actor's outputs; extra2: unit actions; out: slopes
  send,              // features at `in` to the same place of block number `column`; see Context::branches
  none,
};

enum class Activation : std::int32_t { none, relu, tanh };

// Flags.
inline constexpr std::int32_t kAccumulate = 1;  // add to `out`
inline constexpr std::int32_t kLoads = 2;       // the matrix is loaded into the block's memory for this instruction
inline constexpr std::int32_t kJoins = 4;       // all branches have come so far before any goes on
inline constexpr std::int32_t kEnds = 8;        // the last of a branch

// Places (in, other, out, ...) are features of the work-group's arena. `rows`: where a row-major copy of the result goes,
// for the weights' gradients, with `rows_stride` floats from transition to transition. `held`, `loads` and `ahead`: see
// pearl/device/block_memory.hpp.
struct Instruction {
  Operation operation;
  std::int32_t flags = 0;
  std::int32_t in = kNone, other = kNone, extra = kNone, extra2 = kNone, extra3 = kNone, out = kNone, out2 = kNone;
  std::int32_t in_width = 0, other_width = 0, out_width = 0;
  std::int32_t column = 0;      // load: of the batch; act: which draw of noise
  std::int32_t parameters = 0;  // which vector
  Activation activation = Activation::none;
  std::int32_t rows_stride = 0;
  float scalar = 0.0f;
  std::int64_t rows = kNone;
  std::int64_t weight = kNone, bias = kNone;  // offsets in the vector
  std::int32_t held = kNone, loads = 0, ahead = 0;
};

// Weights that one work-group moves: neurons [first, first + count) of a matrix (out, in), columns [begin, end), and
// their biases if `begin` is 0 and lanes are parts of a vector; or, if `in` is 0, `count` entries of a vector.
struct Tile {
  std::int32_t first, count, in, begin, end;
  std::int32_t slopes;          // features of the arena where the neurons' slopes begin
  std::int32_t rows_stride;
  std::int32_t pad = 0;
  std::int64_t rows;  // of the layer's input; where lanes are threads, features of the arena
  std::int64_t weight, bias;
};

// How an optimizer moves a weight; each kernel is compiled for one rule.
enum Rule : std::int32_t { kAdam = 0, kAmsgrad = 1, kSgd = 2, kMomentum = 3, kNesterov = 4 };

struct Optimizer {
  float shrink, decay;             // weight *= shrink (AdamW); gradient += decay * weight
  float beta2, eps, rise1, rise2;  // Adam; rises are 1 - beta
  float lr, momentum, rise, pad;   // SGD
  float* first;                    // Adam's first moment, SGD's momentum
  float* second;
  float* max_second;               // AMSGrad
};

// Values that change from step to step of one optimizer.
struct StepArguments {
  float step_size, denominator;  // Adam: lr / (1 - beta1^t), sqrt(1 - beta2^t)
  float fresh;                   // SGD: 1 if the momentum starts as the gradient
  float target;                  // how far the targets move: 0 to 1
};

// One training step, worked out by the host before it is launched. Kernels read it from memory, so that a recorded launch
// serves for every step.
struct StepNumbers {
  std::uint64_t step;      // its number, for noise
  StepArguments moves[3];  // of DQN or the critics, the actor, and the temperature
};

enum Failure : std::int32_t { kDiverged = 1, kWrongAction = 2 };

// Which vector of parameters.
enum Vector : std::int32_t { kOnline = 0, kTarget = 1, kActor = 2, kTargetActor = 3 };

struct alignas(16) Sums {
  float loss, td_error, policy_loss, entropy_gap;
};

// The kernels' report to the host, which clears it.
struct Outcome {
  float totals[4];         // loss, |TD error|, gradients' norm and actor gradients' norm, added up over steps
  std::int32_t failure;
  std::int32_t failed_at;  // transition
  std::int32_t pending;    // a failure that the next kernel takes over: all of a work-group must see the same one
  std::int32_t steps;      // done
};

// The kernels' constant arguments.
struct Context {
  float* parameters[4];
  const void* columns[5];  // obs, action, reward, next_obs, discount
  const float* weights;
  float* priorities;
  float* arena;
  float* rows;
  float* gradients[2];  // of kOnline and of kActor, if clipped
  float* squares;       // of each tile
  Sums* sums;           // of each work-group
  float* log_alpha;     // SAC
  const float* scales;  // centers and half ranges: of observations, then of actions
  Outcome* outcome;
  std::uint64_t noise_seed;
  std::int64_t arena_features;
  std::int64_t block_features;  // see pearl/device/block_memory.hpp
  std::int32_t batch, groups, observation_size, action_size;
  std::int32_t critics, stochastic;
  std::int32_t branches;  // above 1: so many blocks run a part of the tape each, all of one length
  float saturation_penalty, target_noise, noise_clip, log_std_low, log_std_high, target_entropy, max_grad_norm;
};

}  // namespace pearl::tape
