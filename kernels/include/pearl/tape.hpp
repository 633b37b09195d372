// A training step as a tape: the list of operations that one work-group runs on its 16 transitions, from the batch to
// the slopes of every layer; and the tiles of weights that are moved by them. Both are data, so that one compiled kernel
// trains every network and every algorithm. Shared by the host, which writes them, and by the kernels that read them.
//
// Values lie feature by feature: of one work-group, feature f of transition c stands at f * 16 + c, so that each lane has
// a transition of its own and lanes never wait for one another.
#pragma once

#include <cstdint>

namespace pearl::tape {

inline constexpr int kLanes = 16;      // transitions of a work-group
inline constexpr int kTileRows = 8;    // neurons of a tile of weights
inline constexpr int kNone = -1;

enum class Operation : std::int32_t {
  load,              // columns of the batch to `out`, mapped to unit scale where `in` names one
  linear,            // out = activation(weight x + bias)
  relu,
  tanh,
  layer_norm,        // `other`: mean and 1 / deviation
  combine,           // out = in + scalar * other, either of width 1 or of `out_width`
  mean,
  slope_activation,  // out *= derivative of `activation` at value `in`
  slope_linear,      // out = [out] + weight^T in, times the derivative of `activation` at value `other`
  slope_relu,        // out = [out] + in where value `other` is above 0
  slope_tanh,
  slope_layer_norm,  // in: slope of the result; other: statistics; extra: input; extra2: slope times unit, for the gain
  slope_combine,     // out = [out] + scalar * in, summed over features where `out` has one
  slope_mean,
  dqn_loss,          // in: values; other: the target's values of the next state; extra: what chooses, out: slopes
  act,               // in: what the actor says; out: unit actions; extra: log densities
  critic_loss,       // in, extra: values; other, extra2: next values; extra3: log densities; out, out2: slopes
  policy_loss,       // in, extra: values; other: log densities; out, out2: slopes
  slope_act,         // in, extra: slopes of unit actions; other: what the actor said; extra2: unit actions; out: slopes
};

enum class Activation : std::int32_t { none, relu, tanh };

inline constexpr std::int32_t kAccumulate = 1;  // add to what is there

// Places (in, other, out, ...) are features of the work-group's arena; `rows` is where the result is kept row by row too,
// for the weights' gradients, `rows_stride` floats from transition to transition.
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
};

// Weights that one work-group moves: neurons [first, first + count) of a matrix (out, in), columns [begin, end), and
// their biases where `begin` is 0; or, where `in` is 0, `count` entries of a vector.
struct Tile {
  std::int32_t first, count, in, begin, end;
  std::int32_t slopes;          // features of the arena where the neurons' slopes begin
  std::int32_t rows_stride;
  std::int32_t pad = 0;
  std::int64_t rows;            // of the layer's input
  std::int64_t weight, bias;
};

// How an optimizer moves a weight; kernels are compiled for one of them.
enum Rule : std::int32_t { kAdam = 0, kAmsgrad = 1, kSgd = 2, kMomentum = 3, kNesterov = 4 };

struct Optimizer {
  float shrink, decay;             // what a weight is multiplied by (AdamW), and how much of it the gradient gains
  float beta2, eps, rise1, rise2;  // Adam; rises are 1 - beta
  float lr, momentum, rise, pad;   // SGD
  float* first;                    // Adam's first moment, SGD's momentum
  float* second;
  float* max_second;               // AMSGrad
};

// What changes from step to step.
struct StepArguments {
  float step_size, denominator;  // Adam: lr / (1 - beta1^t), sqrt(1 - beta2^t)
  float fresh;                   // SGD: 1 where the momentum begins as the gradient
  float target;                  // how far the targets move: 0 not at all, 1 all the way
};

enum Failure : std::int32_t { kDiverged = 1, kWrongAction = 2 };

// Which vector of parameters.
enum Vector : std::int32_t { kOnline = 0, kTarget = 1, kActor = 2, kTargetActor = 3 };

struct Sums {
  float loss, td_error, policy_loss, entropy_gap;
};

// What the kernels are told once; in memory that host and device see.
struct Context {
  float* parameters[4];
  const void* columns[5];  // obs, action, reward, next_obs, discount
  const float* weights;
  float* priorities;
  float* arena;
  float* rows;
  float* gradients[2];  // of kOnline and of kActor, where they are clipped
  float* squares;       // of each tile
  Sums* sums;           // of each work-group
  float* log_alpha;     // SAC
  const float* scales;  // centers and half ranges: of observations, then of actions
  float* totals;        // loss, |TD error|, gradients' norm and actor gradients' norm, added up over steps
  std::uint64_t noise_seed;
  std::int64_t arena_features;
  std::int32_t batch, groups, observation_size, action_size;
  std::int32_t failure;
  std::int32_t failed_at;  // transition
  std::int32_t steps;      // done since the host last looked
  std::int32_t critics, stochastic;
  float saturation_penalty, target_noise, noise_clip, log_std_low, log_std_high, target_entropy, max_grad_norm;
};

}  // namespace pearl::tape
