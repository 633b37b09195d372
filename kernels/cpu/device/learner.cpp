#include "pearl/device/learner.hpp"

#include "pearl/device/portable.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>

namespace pearl::device {
namespace {

using learner::Op;
using learner::OpKind;
using tape::Activation;
using tape::Instruction;
using tape::kLanes;
using tape::kNone;
using tape::Operation;
using tape::Tile;

constexpr int kVectorTile = 64;  // entries of a vector that a work-group moves
constexpr int kBlockRows = 16;   // of a block at most, where lanes are threads
constexpr std::size_t kClusterFeatures = 64;  // of the widest layer, for each block of a cluster
constexpr int kWholeRows = 1 << 20;
constexpr int kMostSlices = static_cast<int>(kMostLanes) / kLanes;

int padded(int width) { return (width + kLanes - 1) / kLanes * kLanes; }

struct TapeOperations {
  Operation forward, backward;
};

TapeOperations operations_of(OpKind kind) {
  switch (kind) {
    case OpKind::linear: return {Operation::linear, Operation::slope_linear};
    case OpKind::relu: return {Operation::relu, Operation::slope_relu};
    case OpKind::tanh: return {Operation::tanh, Operation::slope_tanh};
    case OpKind::layer_norm: return {Operation::layer_norm, Operation::slope_layer_norm};
    case OpKind::mean: return {Operation::mean, Operation::slope_mean};
    default: return {Operation::combine, Operation::slope_combine};  // add, subtract
  }
}

// One operation of a network, with the activation joined to it, if any.
struct Step {
  Op op;
  int in[2] = {kNone, kNone}, out = 0;  // values; 0 is the input
  Activation activation = Activation::none;

  int width() const { return static_cast<int>(op.width); }
};

struct Value {
  int width;
  int uses;   // operations that read it
  int maker;  // the step that computes it; kNone for the input
};

// A network's steps: an activation is joined to a linear operation whose result nothing else reads.
struct Plan {
  std::vector<Value> values;
  std::vector<Step> steps;

  explicit Plan(const NetworkSource& source) {
    const std::size_t parameters = static_cast<std::size_t>(-1) / 2;
    const learner::Network checked(source.inputs, source.ops, parameters);  // throws LearnerError
    std::vector<int> users(source.ops.size() + 1, 0);
    std::vector<std::size_t> kept(source.ops.size() + 1, 0);  // the place in `values` of each of the source's values
    for (const Op& op : source.ops)
      for (const auto value : op.inputs)
        if (value != learner::kNone) ++users[static_cast<std::size_t>(value)];
    values = {{static_cast<int>(source.inputs), users[0], kNone}};
    std::set<std::ptrdiff_t> seen;
    for (std::size_t i = 0; i < source.ops.size(); ++i) {
      const Op& op = source.ops[i];
      for (const std::ptrdiff_t offset : {op.weight, op.bias})
        if (offset != learner::kNone && !seen.insert(offset).second)
          throw LearnerError("Operation " + std::to_string(i) + " shares its parameters with another.");
      const std::size_t from = kept[static_cast<std::size_t>(op.inputs[0])];
      const bool activates = op.kind == OpKind::relu || op.kind == OpKind::tanh;
      if (activates && values[from].uses == 1 && values[from].maker != kNone) {
        Step& before = steps[static_cast<std::size_t>(values[from].maker)];
        if (before.op.kind == OpKind::linear && before.activation == Activation::none) {
          before.activation = op.kind == OpKind::relu ? Activation::relu : Activation::tanh;
          kept[i + 1] = from;
          values[from].uses = users[i + 1];
          continue;
        }
      }
      Step step{op, {static_cast<int>(from), kNone}, static_cast<int>(values.size())};
      if (op.kind == OpKind::add || op.kind == OpKind::subtract)
        step.in[1] = static_cast<int>(kept[static_cast<std::size_t>(op.inputs[1])]);
      kept[i + 1] = values.size();
      values.push_back({step.width(), users[i + 1], static_cast<int>(steps.size())});
      steps.push_back(step);
    }
  }

  const Value& value(int v) const { return values[static_cast<std::size_t>(v)]; }
  int width(int v) const { return value(v).width; }
  int output() const { return static_cast<int>(values.size()) - 1; }
  int output_width() const { return values.back().width; }
};

// Where a value is stored row by row, for the gradients of weights.
struct Rows {
  std::int64_t offset = kNone;
  int stride = 0;
};

// One pass of a network: the places of its values and slopes in the arena.
struct Pass {
  const Plan* plan = nullptr;
  int parameters = 0;
  std::vector<int> values, slopes, statistics, products;
  std::vector<Rows> rows;

  int value(int v) const { return values[static_cast<std::size_t>(v)]; }
  int slope(int v) const { return slopes[static_cast<std::size_t>(v)]; }
  int output() const { return value(plan->output()); }
  int output_slope() const { return slope(plan->output()); }
};

}  // namespace

// A part of a tape that depends on no other part, and its features that the rest needs. All begin with the same load.
struct Branch {
  std::vector<Instruction> tape;
  int result, width;
};

struct DeviceLearner::Program {
  std::vector<Branch> branches;
  std::vector<Instruction> tape;  // after the branches, but for its first `apart` instructions, which wait for none
  std::size_t apart = 0;
  std::vector<Tile> tiles;

  // All of it in a row.
  std::vector<Instruction> whole() const {
    std::vector<Instruction> all;
    for (const Branch& branch : branches)
      all.insert(all.end(), branch.tape.begin() + (all.empty() ? 0 : 1), branch.tape.end());
    all.insert(all.end(), tape.begin(), tape.end());
    return all;
  }

  // The tapes of `blocks` blocks, of equal length; the first block has the results of the others.
  std::vector<std::vector<Instruction>> of_blocks(std::size_t blocks) const {
    std::vector<std::vector<Instruction>> tapes(blocks, {{.operation = Operation::none}});
    tapes[0] = tape;
    tapes[0][apart - 1].flags |= tape::kJoins;
    for (std::size_t k = 1; k < blocks; ++k) {
      if (k <= branches.size()) {
        const Branch& branch = branches[k - 1];
        tapes[k] = branch.tape;
        tapes[k].push_back({.operation = Operation::send, .in = branch.result, .in_width = branch.width});
      }
      tapes[k].back().flags |= tape::kJoins;
    }
    std::size_t longest = 0;
    for (std::vector<Instruction>& of_block : tapes) {
      of_block.back().flags |= tape::kEnds;
      longest = std::max(longest, of_block.size());
    }
    for (std::vector<Instruction>& of_block : tapes) of_block.resize(longest, {.operation = Operation::none});
    return tapes;
  }
};

// Writes tapes, and allocates places in the arena and in the rows.
struct DeviceLearner::Builder {
  const LearnerModel& model;
  const LearnerSettings& settings;
  std::vector<Plan> plans;
  std::size_t padded_rows;
  int columns_per_tile;
  bool threads;  // lanes are threads: biases have tiles of their own, and inputs of layers stay where they are
  int features = 0;
  std::int64_t row_floats = 0;

  int place(int count) { return std::exchange(features, features + count); }
  Rows keep(int width) {
    if (threads) return {};
    const int stride = padded(width);
    const auto floats = static_cast<std::int64_t>(stride) * static_cast<std::int64_t>(padded_rows);
    return {std::exchange(row_floats, row_floats + floats), stride};
  }

  // The values and slopes of a pass whose input is at `input`; slopes only where it is `trained`.
  Pass pass(const Plan& plan, int parameters, int input, bool trained) {
    Pass made{&plan, parameters, {input}, {}, {}, {}, {}};
    for (int v = 1; v <= plan.output(); ++v) made.values.push_back(place(plan.width(v)));
    for (int v = 0; trained && v <= plan.output(); ++v) made.slopes.push_back(place(plan.width(v)));
    for (const Step& step : plan.steps) {
      const bool norm = step.op.kind == OpKind::layer_norm;
      made.statistics.push_back(norm ? place(2) : kNone);
      made.products.push_back(norm && trained ? place(step.width()) : kNone);
    }
    made.rows.resize(plan.values.size());
    return made;
  }

  // `weights`: also stores the rows that the gradients of weights need.
  void forward(Pass& pass, bool weights, std::vector<Instruction>& tape) {
    const Plan& plan = *pass.plan;
    std::vector<bool> wanted(plan.values.size(), false);
    for (const Step& step : plan.steps)
      if (step.op.kind == OpKind::linear) wanted[static_cast<std::size_t>(step.in[0])] = weights;
    for (std::size_t s = 0; s < plan.steps.size(); ++s) {
      const Step& step = plan.steps[s];
      const OpKind kind = step.op.kind;
      Instruction i{.operation = operations_of(kind).forward,
                    .in = pass.value(step.in[0]),
                    .out = pass.value(step.out),
                    .in_width = plan.width(step.in[0]),
                    .out_width = step.width(),
                    .parameters = pass.parameters,
                    .activation = step.activation,
                    .weight = step.op.weight,
                    .bias = step.op.bias};
      if (kind == OpKind::layer_norm) {
        i.other = pass.statistics[s];
        i.scalar = step.op.eps;
      } else if (kind == OpKind::mean) {
        i.scalar = 1.0f / static_cast<float>(i.in_width);
      } else if (step.in[1] != kNone) {
        i.other = pass.value(step.in[1]);
        i.other_width = plan.width(step.in[1]);
        i.scalar = kind == OpKind::add ? 1.0f : -1.0f;
      }
      if (wanted[static_cast<std::size_t>(step.out)]) {
        const Rows rows = keep(i.out_width);
        pass.rows[static_cast<std::size_t>(step.out)] = rows;
        i.rows = rows.offset;
        i.rows_stride = rows.stride;
      }
      tape.push_back(i);
    }
  }

  // From the slopes at the output. `tiles`, unless null, gets the weights to move.
  void backward(const Pass& pass, bool of_input, std::vector<Instruction>& tape, std::vector<Tile>* tiles) {
    const Plan& plan = *pass.plan;
    std::vector<bool> written(plan.values.size(), false), derived(plan.steps.size(), false);
    for (std::size_t s = plan.steps.size(); s-- > 0;) {
      const Step& step = plan.steps[s];
      const OpKind kind = step.op.kind;
      if (step.activation != Activation::none && !derived[s])
        tape.push_back({.operation = Operation::slope_activation,
                        .in = pass.value(step.out),
                        .out = pass.slope(step.out),
                        .in_width = step.width(),
                        .out_width = step.width(),
                        .activation = step.activation});
      if (tiles != nullptr) add_tiles(pass, s, *tiles);
      for (int k = 0; k < 2 && step.in[k] != kNone; ++k) {
        const int v = step.in[k];
        const Value& value = plan.value(v);
        const bool stops = v == 0 && !of_input;
        if (stops && kind != OpKind::layer_norm) continue;
        Instruction i{.operation = operations_of(kind).backward,
                      .flags = written[static_cast<std::size_t>(v)] ? tape::kAccumulate : 0,
                      .in = pass.slope(step.out),
                      .out = stops ? kNone : pass.slope(v),
                      .in_width = step.width(),
                      .out_width = value.width,
                      .parameters = pass.parameters,
                      .weight = step.op.weight,
                      .bias = step.op.bias};
        written[static_cast<std::size_t>(v)] = true;
        if (kind == OpKind::linear && value.maker != kNone && value.uses == 1) {
          const auto maker = static_cast<std::size_t>(value.maker);
          i.activation = plan.steps[maker].activation;
          i.other = pass.value(v);
          derived[maker] = true;
        } else if (kind == OpKind::relu || kind == OpKind::tanh) {
          i.other = pass.value(step.out);
        } else if (kind == OpKind::layer_norm) {
          i.other = pass.statistics[s];
          i.extra = pass.value(v);
          i.extra2 = tiles != nullptr && step.op.weight != learner::kNone ? pass.products[s] : kNone;
        } else if (kind == OpKind::mean) {
          i.scalar = 1.0f / static_cast<float>(value.width);
        } else if (kind == OpKind::add || kind == OpKind::subtract) {
          i.scalar = kind == OpKind::subtract && k == 1 ? -1.0f : 1.0f;
        }
        tape.push_back(i);
      }
    }
  }

  void add_tiles(const Pass& pass, std::size_t s, std::vector<Tile>& tiles) {
    const Step& step = pass.plan->steps[s];
    const int width = step.width();
    if (step.op.kind == OpKind::layer_norm) {
      if (step.op.weight != learner::kNone) add_vector(pass.products[s], width, step.op.weight, tiles);
      if (step.op.bias != learner::kNone) add_vector(pass.slope(step.out), width, step.op.bias, tiles);
    }
    if (step.op.kind != OpKind::linear) return;
    const int in = pass.plan->width(step.in[0]);
    const Rows& rows = pass.rows[static_cast<std::size_t>(step.in[0])];
    const bool apart = threads && step.op.bias != learner::kNone;
    const int tile_rows = threads ? tape::kTileRowsOfThreads : tape::kTileRows;
    for (int first = 0; first < width; first += tile_rows)
      for (int begin = 0; begin < in; begin += columns_per_tile)
        tiles.push_back({.first = first,
                         .count = std::min(tile_rows, width - first),
                         .in = in,
                         .begin = begin,
                         .end = std::min(in, begin + columns_per_tile),
                         .slopes = pass.slope(step.out) + first,
                         .rows_stride = rows.stride,
                         .rows = threads ? pass.value(step.in[0]) : rows.offset,
                         .weight = step.op.weight,
                         .bias = apart ? kNone : step.op.bias});
    if (apart) add_vector(pass.slope(step.out), width, step.op.bias, tiles);
  }

  static void add_vector(int slopes, int width, std::ptrdiff_t weight, std::vector<Tile>& tiles) {
    for (int first = 0; first < width; first += kVectorTile) {
      Tile tile{};
      tile.first = first;
      tile.count = std::min(kVectorTile, width - first);
      tile.slopes = slopes + first;
      tile.weight = weight;
      tile.bias = kNone;
      tiles.push_back(tile);
    }
  }

  // Loads a column of `width` features to `out`, scaled by `scale` unless it is kNone; also stored in `rows`, if any.
  static Instruction load(int column, int out, int width, int scale, const Rows& rows = {}) {
    return {.operation = Operation::load,
            .in = scale,
            .out = out,
            .out_width = width,
            .column = column,
            .rows_stride = rows.stride,
            .rows = rows.offset};
  }

  // Turns an actor's output into unit actions at `out`, with noise number `draw`.
  static Instruction act(const Pass& actor, int out, int draw, int log_density) {
    return {.operation = Operation::act, .in = actor.output(), .extra = log_density, .out = out, .column = draw};
  }

  Program dqn() {
    Program program;
    std::vector<Instruction>& tape = program.tape;
    const Plan& plan = plans[0];
    const int observations = static_cast<int>(model.observation_size);
    const int next_input = place(observations), input = place(observations);
    const auto judged = [&](int parameters) {
      Pass pass = this->pass(plan, parameters, next_input, false);
      Branch branch{{load(3, next_input, observations, kNone)}, pass.output(), plan.output_width()};
      forward(pass, false, branch.tape);
      program.branches.push_back(std::move(branch));
      return pass;
    };
    const Pass next = judged(tape::kTarget);
    const Pass chooser = settings.double_q ? judged(tape::kOnline) : next;
    Pass trained = pass(plan, tape::kOnline, input, true);
    trained.rows[0] = keep(observations);
    tape.push_back(load(0, input, observations, kNone, trained.rows[0]));
    forward(trained, true, tape);
    program.apart = tape.size();
    tape.push_back({.operation = Operation::dqn_loss,
                    .in = trained.output(),
                    .other = next.output(),
                    .extra = chooser.output(),
                    .out = trained.output_slope(),
                    .in_width = plan.output_width()});
    backward(trained, false, tape, &program.tiles);
    return program;
  }

  // The critics' program, and the actor's.
  std::vector<Program> actor_critic() {
    std::vector<Program> programs(2);
    std::vector<Instruction>& tape = programs[0].tape;
    const int observations = static_cast<int>(model.observation_size), actions = static_cast<int>(model.action_size);
    const int action_scale = 2 * observations, inputs = observations + actions;
    const bool two = plans.size() == 3;
    const int next_input = place(inputs), input = place(inputs), log_density = place(1);
    tape.push_back(load(3, next_input, observations, 0));
    const int chooser = model.parameters[tape::kTargetActor] != nullptr ? tape::kTargetActor : tape::kActor;
    Pass next_actor = pass(plans[0], chooser, next_input, false);
    forward(next_actor, false, tape);
    tape.push_back(act(next_actor, next_input + observations, 0, log_density));
    const Rows input_rows = keep(inputs);
    tape.push_back(load(0, input, observations, 0, input_rows));
    tape.push_back(load(1, input + observations, actions, action_scale,
                        {input_rows.offset + observations, input_rows.stride}));
    std::vector<Pass> targets, trained;
    for (std::size_t critic = 1; critic < plans.size(); ++critic) {
      targets.push_back(pass(plans[critic], tape::kTarget, next_input, false));
      forward(targets.back(), false, tape);
      trained.push_back(pass(plans[critic], tape::kOnline, input, true));
      trained.back().rows[0] = input_rows;
      forward(trained.back(), true, tape);
    }
    tape.push_back({.operation = Operation::critic_loss,
                    .in = trained[0].output(),
                    .other = targets[0].output(),
                    .extra = two ? trained[1].output() : kNone,
                    .extra2 = two ? targets[1].output() : kNone,
                    .extra3 = log_density,
                    .out = trained[0].output_slope(),
                    .out2 = two ? trained[1].output_slope() : kNone});
    for (const Pass& pass : trained) backward(pass, false, tape, &programs[0].tiles);

    // The critics' new weights judge the actor's actions: those of the first critic alone, or of both with entropy.
    std::vector<Instruction>& actor_tape = programs[1].tape;
    const bool both = settings.stochastic && two;
    Pass actor = pass(plans[0], tape::kActor, input, true);
    actor.rows[0] = keep(observations);
    actor_tape.push_back(load(0, input, observations, 0, actor.rows[0]));
    forward(actor, true, actor_tape);
    actor_tape.push_back(act(actor, input + observations, 1, log_density));
    if (!both) trained.resize(1);
    for (Pass& pass : trained) forward(pass, false, actor_tape);
    actor_tape.push_back({.operation = Operation::policy_loss,
                          .in = trained[0].output(),
                          .other = log_density,
                          .extra = both ? trained[1].output() : kNone,
                          .out = trained[0].output_slope(),
                          .out2 = both ? trained[1].output_slope() : kNone});
    for (const Pass& pass : trained) backward(pass, true, actor_tape, nullptr);
    actor_tape.push_back({.operation = Operation::slope_act,
                          .in = trained[0].slope(0) + observations,
                          .other = actor.output(),
                          .extra = both ? trained[1].slope(0) + observations : kNone,
                          .extra2 = input + observations,
                          .out = actor.output_slope()});
    backward(actor, false, actor_tape, &programs[1].tiles);
    return programs;
  }
};

tape::Rule rule_of(const OptimizerSettings& settings) {
  return settings.adam               ? settings.max_second != nullptr ? tape::kAmsgrad : tape::kAdam
         : settings.first == nullptr ? tape::kSgd
         : settings.nesterov         ? tape::kNesterov
                                     : tape::kMomentum;
}

tape::Optimizer on_device(const OptimizerSettings& settings) {
  tape::Optimizer optimizer{};
  optimizer.shrink = settings.decoupled ? static_cast<float>(1.0 - settings.lr * settings.decay) : 1.0f;
  optimizer.decay = settings.decoupled ? 0.0f : static_cast<float>(settings.decay);
  optimizer.beta2 = static_cast<float>(settings.beta2);
  optimizer.eps = static_cast<float>(settings.eps);
  optimizer.rise1 = static_cast<float>(1.0 - settings.beta1);
  optimizer.rise2 = static_cast<float>(1.0 - settings.beta2);
  optimizer.lr = static_cast<float>(settings.lr);
  optimizer.momentum = static_cast<float>(settings.momentum);
  optimizer.rise = static_cast<float>(1.0 - settings.dampening);
  optimizer.first = settings.first;
  optimizer.second = settings.second;
  optimizer.max_second = settings.max_second;
  return optimizer;
}

tape::StepArguments next_step(const OptimizerSettings& settings, std::int64_t before) {
  tape::StepArguments step{};
  if (settings.adam) {
    const double t = static_cast<double>(*settings.steps) + static_cast<double>(before) + 1.0;
    step.step_size = static_cast<float>(settings.lr / (1.0 - std::pow(settings.beta1, t)));
    step.denominator = static_cast<float>(std::sqrt(1.0 - std::pow(settings.beta2, t)));
  } else {
    step.fresh = settings.fresh && before == 0 ? 1.0f : 0.0f;
  }
  return step;
}

Moves moves_of(const LearnerSettings& settings, std::int64_t step) {
  const std::int64_t number = step + 1;
  const bool moves = number % settings.policy_delay == 0;
  float target = 0.0f;
  if (settings.tau < 1.0)
    target = moves ? static_cast<float>(settings.tau) : 0.0f;
  else if (number % settings.target_interval == 0 && moves)
    target = 1.0f;
  return {moves, target};
}

void throw_diverged(const std::string& device) {
  throw LearnerError("The training step diverged on " + device +
                     ": the loss or the gradients are not finite. Look at the batch for NaN or huge observations and "
                     "rewards; a smaller learning rate or max_grad_norm may help. Do not use its weights: --resume "
                     "continues from the last checkpoint.");
}

void throw_wrong_action(std::size_t actions, std::size_t position) {
  throw LearnerError("Actions must lie in [0, " + std::to_string(actions) +
                     "); found one that does not at position " + std::to_string(position) + " of the batch.");
}

DeviceBatch OwnBatch::of(DeviceQueue& queue, std::size_t rows, const RowBytes& bytes) {
  if (rows != rows_) {
    rows_ = 0;  // until all is made
    for (int c = 0; c < 5; ++c) columns_[c] = {queue, rows * bytes[c], Placement::pinned};
    weights_ = {queue, rows, Placement::pinned};
    priorities_ = {queue, rows, Placement::pinned};
    rows_ = rows;
  }
  DeviceBatch batch;
  for (int c = 0; c < 5; ++c) batch.columns[c] = columns_[c].data();
  batch.weights = weights_.data();
  batch.priorities = priorities_.data();
  return batch;
}

static std::size_t widest_of(const LearnerModel& model) {
  std::size_t widest = 0;
  for (const NetworkSource& network : model.networks)
    for (const Op& op : network.ops) widest = std::max(widest, op.width);
  return widest;
}

// Enough rows of lanes for the widest layer to run in one pass, with 8 neurons for a row; 4 where lanes are threads,
// whose rows also share the terms of sums.
static int slices_of(std::size_t widest, bool threads) {
  const std::size_t neurons = threads ? 4 : 8, most = threads ? kBlockRows : kMostSlices;
  return static_cast<int>(
      std::clamp<std::size_t>(std::bit_ceil((widest + neurons - 1) / neurons), threads ? 2 : 8, most));
}

DeviceLearner::DeviceLearner(std::shared_ptr<DeviceQueue> queue, LearnerModel model, LearnerCut cut)
    : queue_(std::move(queue)), model_(std::move(model)), cut_(cut) {
  for (const NetworkSource& network : model_.networks) Plan{network};
  // A CPU runs a work-group's lanes as one vector; a GPU needs more lanes and more groups.
  const bool threads = queue_->team() > 1;
  const std::size_t widest = widest_of(model_);
  if (cut_.slices == 0) {
    cut_.slices = queue_->is_cpu() ? 1 : slices_of(widest, threads);
    if (threads) most_cluster_ = widest / kClusterFeatures;
  }
  if (cut_.columns_per_tile == 0) cut_.columns_per_tile = queue_->is_cpu() ? kWholeRows : threads ? 32 : 64;
  const int least = threads ? 2 : 1;  // whole warps
  const int most = threads ? kBlockRows * static_cast<int>(queue_->most_cluster()) : kMostSlices;
  if (cut_.slices < least || cut_.slices > most || cut_.columns_per_tile < kLanes ||
      cut_.columns_per_tile % kLanes != 0)
    throw LearnerError("A step takes " + std::to_string(least) + " to " + std::to_string(most) +
                       " slices and tiles of a multiple of " + std::to_string(kLanes) + " columns; found " +
                       std::to_string(cut_.slices) + " and " + std::to_string(cut_.columns_per_tile) + ".");
  if (threads) {
    rows_of_block_ = std::min(cut_.slices, kBlockRows);
    cluster_ = static_cast<std::size_t>(cut_.slices / rows_of_block_);
    if (rows_of_block_ % 2 != 0 || cut_.slices % rows_of_block_ != 0)
      throw LearnerError("Slices are an even number or, from " + std::to_string(kBlockRows) +
                         ", a multiple of it; found " + std::to_string(cut_.slices) + ".");
  }
  kernels_ = compile(tape::kAdam);
  arguments_ = {*queue_, 1};
  outcome_ = {*queue_, 1};
  scales_ = {*queue_, std::max<std::size_t>(model_.scales.size(), 1), Placement::device};
  queue_->copy(model_.scales.data(), scales_.data(), model_.scales.size() * sizeof(float));
}

void DeviceLearner::set(const LearnerSettings& settings) {
  const bool rebuild = settings.double_q != settings_.double_q || settings.stochastic != settings_.stochastic ||
                       (settings.max_grad_norm > 0) != (settings_.max_grad_norm > 0);
  settings_ = settings;
  if (rebuild) rows_ = 0;
  arguments_[0].context.stochastic = settings.stochastic;
  copy_settings(settings, arguments_[0].context);
}

void DeviceLearner::set_optimizer(Which which, const OptimizerSettings& settings) {
  optimizers_[which] = settings;
  arguments_[0].optimizers[which] = on_device(settings);
  const std::shared_ptr<const Kernels> mover = compile(rule_of(settings));
  build_ += mover != movers_[which];
  movers_[which] = mover;
}

std::shared_ptr<const Kernels> DeviceLearner::compile(int rule) {
  std::vector<std::string> kernels{"pearl_move_weights", "pearl_move_temperature"};
  if (rule == tape::kAdam) kernels.insert(kernels.end(), {"pearl_run_tape", "pearl_gradients"});
  return queue_->compile("learner", kernels,
                         {"-DPEARL_SLICED=" + std::to_string(cut_.slices > 1), "-DPEARL_RULE=" + std::to_string(rule)});
}

DeviceBatch DeviceLearner::own_batch(std::size_t rows) {
  return own_.of(*queue_, rows, model_.row_bytes());
}

void DeviceLearner::set_batch(std::size_t rows, const DeviceBatch& batch) {
  if (rows != rows_) build(rows);
  tape::Context& context = arguments_[0].context;
  std::copy(batch.columns, batch.columns + 5, context.columns);
  context.weights = batch.weights;
  context.priorities = batch.priorities;
}

DeviceLearner::Phase DeviceLearner::upload(const std::vector<Instruction>& tape, const std::vector<Tile>& tiles) {
  Phase phase{{*queue_, tape.size(), Placement::device}, {*queue_, tiles.size(), Placement::device}};
  queue_->copy(tape.data(), phase.tape.data(), tape.size() * sizeof tape[0]);
  queue_->copy(tiles.data(), phase.tiles.data(), tiles.size() * sizeof tiles[0]);
  return phase;
}

std::size_t DeviceLearner::block_bytes() const {
  for (const float* vector : model_.parameters)
    if (reinterpret_cast<std::uintptr_t>(vector) % 16 != 0) return 0;  // it cannot be copied by fours
  const std::size_t most = queue_->most_block_bytes((*kernels_)["pearl_run_tape"]);
  return cut_.block_bytes < 0 ? most : std::min(most, static_cast<std::size_t>(cut_.block_bytes));
}

static BlockMemory planned(std::vector<std::vector<Instruction>>& tapes, std::size_t features, std::size_t blocks,
                           std::size_t bytes) {
  std::vector<std::vector<Instruction>*> all;
  for (std::vector<Instruction>& tape : tapes) all.push_back(&tape);
  return plan_block_memory(all, features, blocks, bytes);
}

// The tape of each program, with the places of its matrices: in branches if it has some, the device has as many blocks that
// wait for each other, and each holds all values.
std::vector<std::vector<Instruction>> DeviceLearner::plan_tapes(const std::vector<Program>& programs,
                                                                std::size_t groups, std::size_t features) {
  branches_ = std::bit_ceil(programs.front().branches.size() + 1);
  if (cut_.branches && branches_ > 1 && cluster_ == 1 && queue_->cluster_of(groups, branches_) == branches_) {
    std::vector<std::vector<Instruction>> of_blocks = programs.front().of_blocks(branches_);
    memory_ = planned(of_blocks, features, 1, block_bytes());
    if (memory_.features == features) {
      std::vector<Instruction> joined;
      for (const std::vector<Instruction>& tape : of_blocks) joined.insert(joined.end(), tape.begin(), tape.end());
      return {std::move(joined)};
    }
  }
  branches_ = 1;
  std::vector<std::vector<Instruction>> tapes;
  for (const Program& program : programs) tapes.push_back(program.whole());
  memory_ = planned(tapes, features, cluster_, block_bytes());
  return tapes;
}

void DeviceLearner::build(std::size_t rows) {
  if (rows < 1) throw LearnerError("A batch needs at least one transition.");
  rows_ = 0;  // until all is made: without memory for some of it, the next call begins again
  const std::size_t groups = (rows + kLanes - 1) / kLanes;
  std::vector<Plan> plans(model_.networks.begin(), model_.networks.end());
  Builder builder{model_, settings_, std::move(plans), groups * kLanes, cut_.columns_per_tile, queue_->team() > 1};
  std::vector<Program> programs;
  if (model_.actor_critic)
    programs = builder.actor_critic();
  else
    programs.push_back(builder.dqn());

  const std::size_t arena_rows = static_cast<std::size_t>(builder.features) * groups + tape::kTileRows;
  arena_ = {*queue_, arena_rows * kLanes, Placement::device};
  kept_rows_ = {*queue_, static_cast<std::size_t>(builder.row_floats), Placement::device};
  if (most_cluster_ > 0) cluster_ = queue_->cluster_of(groups, most_cluster_);
  const auto features = static_cast<std::size_t>(builder.features);
  const std::vector<std::vector<Instruction>> tapes = plan_tapes(programs, groups, features);
  sums_ = {*queue_, groups, Placement::device};
  squares_ = {*queue_, std::max(programs.front().tiles.size(), programs.back().tiles.size()), Placement::device};
  if (settings_.max_grad_norm > 0) {
    gradients_[0] = {*queue_, model_.counts[tape::kOnline], Placement::device};
    if (model_.actor_critic) gradients_[1] = {*queue_, model_.counts[tape::kActor], Placement::device};
  }
  phases_.clear();
  for (std::size_t p = 0; p < programs.size(); ++p) phases_.push_back(upload(tapes[p], programs[p].tiles));
  tape::Context& context = arguments_[0].context;
  std::copy(model_.parameters, model_.parameters + 4, context.parameters);
  context.arena = arena_.data();
  context.rows = kept_rows_.data();
  context.gradients[0] = gradients_[0].data();
  context.gradients[1] = gradients_[1].data();
  context.squares = squares_.data();
  context.sums = sums_.data();
  context.log_alpha = model_.log_alpha;
  context.scales = scales_.data();
  context.outcome = outcome_.there();
  context.arena_features = builder.features;
  context.branches = static_cast<std::int32_t>(branches_);
  context.block_features = static_cast<std::int64_t>(memory_.features);
  context.batch = static_cast<std::int32_t>(rows);
  context.groups = static_cast<std::int32_t>(groups);
  context.observation_size = static_cast<std::int32_t>(model_.observation_size);
  context.action_size = static_cast<std::int32_t>(model_.action_size);
  context.critics = static_cast<std::int32_t>(model_.networks.size()) - 1;
  rows_ = rows;
  groups_ = groups;
  ++build_;
}

void DeviceLearner::prepare(std::int64_t step, std::size_t count) {
  first_ = step;
  Arguments& arguments = arguments_[0];
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t number = step + static_cast<std::int64_t>(i);
    const auto [moves, target] = moves_of(settings_, number);
    tape::StepNumbers& numbers = arguments.steps[i];
    numbers.step = static_cast<std::uint64_t>(number);
    const bool wanted[] = {true, model_.actor_critic && moves, model_.actor_critic && moves && has_temperature()};
    for (int which = 0; which < 3; ++which) {
      if (!wanted[which]) continue;
      numbers.moves[which] = next_step(optimizers_[which], launched_[which]++);
      numbers.moves[which].target = target;
    }
  }
  outcome_.send(*queue_, 0, 1);
  arguments_.send_bytes(*queue_, offsetof(Arguments, steps) + count * sizeof arguments.steps[0]);
}

void DeviceLearner::run(const Phase& phase, Which which, std::size_t place) {
  const bool threads = queue_->team() > 1;
  const auto slices = static_cast<std::size_t>(threads ? rows_of_block_ : cut_.slices);
  const Arguments* const arguments = arguments_.there();
  const tape::Context* const context = &arguments->context;
  const tape::StepNumbers* const numbers = &arguments->steps[place];
  const int policy = which == kActor;
  queue_->launch_shape(
      (*kernels_)["pearl_run_tape"], {groups_, slices, kLanes, std::max(cluster_, branches_), memory_.bytes}, context,
      static_cast<const Instruction*>(phase.tape.data()), static_cast<int>(phase.tape.size()), numbers);
  const Tile* tiles = phase.tiles.data();
  const std::size_t columns = cut_.slices > 1 ? static_cast<std::size_t>(cut_.columns_per_tile) / kLanes : 1;
  const std::size_t rows = threads ? slices : std::min<std::size_t>(columns, kMostSlices);
  if (settings_.max_grad_norm > 0)
    queue_->launch_rows((*kernels_)["pearl_gradients"], phase.tiles.size(), rows, kLanes, context, tiles, policy);
  queue_->launch_rows((*movers_[which])["pearl_move_weights"], phase.tiles.size(), rows, kLanes, context, tiles,
                     static_cast<int>(phase.tiles.size()), &arguments->optimizers[which], numbers, policy);
}

void DeviceLearner::launch(std::size_t place) {
  run(phases_[0], kMain, place);
  if (!model_.actor_critic || !moves_of(settings_, first_ + static_cast<std::int64_t>(place)).policy) return;
  run(phases_[1], kActor, place);
  if (!has_temperature()) return;
  const Arguments* const arguments = arguments_.there();
  queue_->launch_rows((*movers_[kTemperature])["pearl_move_temperature"], 1, rows_of_block_, kLanes,
                      &arguments->context, &arguments->optimizers[kTemperature], &arguments->steps[place]);
}

DeviceLearner::Kind DeviceLearner::kind(std::size_t count) const {
  Kind kind{build_, 0};
  for (std::size_t place = 0; place < count; ++place)
    kind.policy |= std::uint64_t{moves_of(settings_, first_ + static_cast<std::int64_t>(place)).policy} << place;
  return kind;
}

LearnerMetrics DeviceLearner::finish() {
  outcome_.fetch(*queue_);
  queue_->wait();
  const tape::Outcome outcome = std::exchange(outcome_[0], tape::Outcome{});  // sent with the next steps
  const std::int64_t done = outcome.steps, launched = launched_[kMain];
  LearnerMetrics metrics;
  metrics.steps = done;
  metrics.actor_steps = launched_[kActor];
  const double count = static_cast<double>(std::max<std::int64_t>(done, 1));
  metrics.loss = outcome.totals[0] / count;
  metrics.td_error = outcome.totals[1] / count;
  metrics.gradient_norm = outcome.totals[2] / count;
  metrics.actor_gradient_norm = outcome.totals[3] / static_cast<double>(std::max<std::int64_t>(metrics.actor_steps, 1));
  const bool failed = outcome.failure != 0;
  for (int which = 0; which < 3; ++which) {
    OptimizerSettings& optimizer = optimizers_[which];
    std::int64_t moved = launched_[which];
    // After a failure only a share of the steps was made: count the same share of each optimizer's steps.
    if (failed && launched > 0) moved = moved * done / launched;
    if (optimizer.adam && optimizer.steps != nullptr) *optimizer.steps += static_cast<float>(moved);
    if (launched_[which] > 0) optimizer.fresh = false;
    launched_[which] = 0;
  }
  if (!failed) return metrics;
  if (outcome.failure == tape::kWrongAction)
    throw_wrong_action(static_cast<std::size_t>(Plan(model_.networks[0]).output_width()),
                       static_cast<std::size_t>(outcome.failed_at));
  throw_diverged(queue_->name());
}

}  // namespace pearl::device
