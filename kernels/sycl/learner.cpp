#include "learner.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
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

constexpr std::size_t kVectorTile = 64;  // entries of a vector that a work-group moves
constexpr int kWholeRows = 1 << 20;

int padded(int width) { return (width + kLanes - 1) / kLanes * kLanes; }

// A network's operations with activations joined to the linear ones that they alone follow.
struct Step {
  Op op;
  int in[2] = {kNone, kNone}, out = 0;  // values that are kept; 0 is the input
  Activation activation = Activation::none;
};

struct Plan {
  std::vector<int> widths;  // of the values that are kept
  std::vector<Step> steps;
  std::vector<int> uses;
  std::vector<int> makers;  // of each value: the step; kNone of the input

  explicit Plan(const NetworkSource& source) {
    const std::size_t parameters = static_cast<std::size_t>(-1) / 2;
    const learner::Network checked(source.inputs, source.ops, parameters);  // LearnerError for what does not fit
    std::vector<int> users(source.ops.size() + 1, 0), kept(source.ops.size() + 1, 0);
    for (const Op& op : source.ops)
      for (const auto value : op.inputs)
        if (value != learner::kNone) ++users[static_cast<std::size_t>(value)];
    widths = {static_cast<int>(source.inputs)};
    uses = {users[0]};
    makers = {kNone};
    std::set<std::ptrdiff_t> seen;
    for (std::size_t i = 0; i < source.ops.size(); ++i) {
      const Op& op = source.ops[i];
      for (const std::ptrdiff_t offset : {op.weight, op.bias})
        if (offset != learner::kNone && !seen.insert(offset).second)
          throw LearnerError("Operation " + std::to_string(i) + " shares its parameters with another.");
      const int from = kept[static_cast<std::size_t>(op.inputs[0])];
      const bool activates = op.kind == OpKind::relu || op.kind == OpKind::tanh;
      if (activates && uses[static_cast<std::size_t>(from)] == 1 && makers[static_cast<std::size_t>(from)] != kNone) {
        Step& before = steps[static_cast<std::size_t>(makers[static_cast<std::size_t>(from)])];
        if (before.op.kind == OpKind::linear && before.activation == Activation::none) {
          before.activation = op.kind == OpKind::relu ? Activation::relu : Activation::tanh;
          kept[i + 1] = from;
          uses[static_cast<std::size_t>(from)] = users[i + 1];
          continue;
        }
      }
      Step step;
      step.op = op;
      step.in[0] = from;
      if (op.kind == OpKind::add || op.kind == OpKind::subtract) step.in[1] = kept[static_cast<std::size_t>(op.inputs[1])];
      step.out = static_cast<int>(widths.size());
      kept[i + 1] = step.out;
      widths.push_back(static_cast<int>(op.width));
      uses.push_back(users[i + 1]);
      makers.push_back(static_cast<int>(steps.size()));
      steps.push_back(step);
    }
  }

  int width(int value) const { return widths[static_cast<std::size_t>(value)]; }
  int output() const { return static_cast<int>(widths.size()) - 1; }
  int output_width() const { return widths.back(); }
};

// Where a value's rows are kept for the gradients of weights.
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

// Writes tapes, and hands out places of the arena and of the rows.
struct DeviceLearner::Builder {
  std::size_t padded_rows;
  int columns_per_tile;
  int features = 0;
  std::int64_t row_floats = 0;

  int place(int count) { return std::exchange(features, features + count); }
  Rows keep(int width) {
    const int stride = padded(width);
    return {std::exchange(row_floats, row_floats + static_cast<std::int64_t>(stride) * static_cast<std::int64_t>(padded_rows)),
            stride};
  }
  static void keep_in(Instruction& instruction, const Rows& rows) {
    instruction.rows = rows.offset;
    instruction.rows_stride = rows.stride;
  }

  // `trained`: slopes are wanted. The input's values are at `input`, its slopes anywhere.
  Pass pass(const Plan& plan, int parameters, int input, bool trained) {
    Pass made{&plan, parameters, {input}, {}, {}, {}, {}};
    for (int v = 1; v <= plan.output(); ++v) made.values.push_back(place(plan.width(v)));
    for (int v = 0; trained && v <= plan.output(); ++v) made.slopes.push_back(place(plan.width(v)));
    for (const Step& step : plan.steps) {
      const bool norm = step.op.kind == OpKind::layer_norm;
      made.statistics.push_back(norm ? place(2) : kNone);
      made.products.push_back(norm && trained ? place(static_cast<int>(step.op.width)) : kNone);
    }
    made.rows.resize(plan.widths.size());
    return made;
  }

  // `weights`: the rows that the gradients of weights need are kept.
  void forward(Pass& pass, bool weights, std::vector<Instruction>& tape) {
    const Plan& plan = *pass.plan;
    std::vector<bool> wanted(plan.widths.size(), false);
    for (const Step& step : plan.steps)
      if (step.op.kind == OpKind::linear) wanted[static_cast<std::size_t>(step.in[0])] = weights;
    for (std::size_t s = 0; s < plan.steps.size(); ++s) {
      const Step& step = plan.steps[s];
      Instruction i{};
      i.parameters = pass.parameters;
      i.in = pass.value(step.in[0]);
      i.in_width = plan.width(step.in[0]);
      i.out = pass.value(step.out);
      i.out_width = static_cast<int>(step.op.width);
      i.weight = step.op.weight;
      i.bias = step.op.bias;
      switch (step.op.kind) {
        case OpKind::linear:
          i.operation = Operation::linear;
          i.activation = step.activation;
          break;
        case OpKind::relu:
          i.operation = Operation::relu;
          break;
        case OpKind::tanh:
          i.operation = Operation::tanh;
          break;
        case OpKind::layer_norm:
          i.operation = Operation::layer_norm;
          i.other = pass.statistics[s];
          i.scalar = step.op.eps;
          break;
        case OpKind::add:
        case OpKind::subtract:
          i.operation = Operation::combine;
          i.other = pass.value(step.in[1]);
          i.other_width = plan.width(step.in[1]);
          i.scalar = step.op.kind == OpKind::add ? 1.0f : -1.0f;
          break;
        case OpKind::mean:
          i.operation = Operation::mean;
          i.scalar = 1.0f / static_cast<float>(i.in_width);
          break;
      }
      if (wanted[static_cast<std::size_t>(step.out)]) {
        Rows& rows = pass.rows[static_cast<std::size_t>(step.out)];
        rows = keep(i.out_width);
        keep_in(i, rows);
      }
      tape.push_back(i);
    }
  }

  // From the slopes at the output; `tiles`, if any, gets the weights that they move.
  void backward(const Pass& pass, bool of_input, std::vector<Instruction>& tape, std::vector<Tile>* tiles) {
    const Plan& plan = *pass.plan;
    std::vector<bool> written(plan.widths.size(), false), derived(plan.steps.size(), false);
    for (std::size_t s = plan.steps.size(); s-- > 0;) {
      const Step& step = plan.steps[s];
      const int width = static_cast<int>(step.op.width);
      if (step.activation != Activation::none && !derived[s]) {
        Instruction i{};
        i.operation = Operation::slope_activation;
        i.activation = step.activation;
        i.in = pass.value(step.out);
        i.out = pass.slope(step.out);
        i.in_width = i.out_width = width;
        tape.push_back(i);
      }
      if (tiles != nullptr) add_tiles(pass, s, *tiles);
      for (int k = 0; k < 2 && step.in[k] != kNone; ++k) {
        const int value = step.in[k];
        const bool stops = value == 0 && !of_input;
        if (stops && step.op.kind != OpKind::layer_norm) continue;
        Instruction i{};
        i.parameters = pass.parameters;
        i.in = pass.slope(step.out);
        i.in_width = width;
        i.out = stops ? kNone : pass.slope(value);
        i.out_width = plan.width(value);
        i.weight = step.op.weight;
        i.bias = step.op.bias;
        i.flags = written[static_cast<std::size_t>(value)] ? tape::kAccumulate : 0;
        written[static_cast<std::size_t>(value)] = true;
        switch (step.op.kind) {
          case OpKind::linear: {
            i.operation = Operation::slope_linear;
            const int maker = plan.makers[static_cast<std::size_t>(value)];
            if (maker != kNone && plan.uses[static_cast<std::size_t>(value)] == 1) {
              i.activation = plan.steps[static_cast<std::size_t>(maker)].activation;
              i.other = pass.value(value);
              derived[static_cast<std::size_t>(maker)] = true;
            }
            break;
          }
          case OpKind::relu:
          case OpKind::tanh:
            i.operation = step.op.kind == OpKind::relu ? Operation::slope_relu : Operation::slope_tanh;
            i.other = pass.value(step.out);
            break;
          case OpKind::layer_norm:
            i.operation = Operation::slope_layer_norm;
            i.other = pass.statistics[s];
            i.extra = pass.value(value);
            i.extra2 = tiles != nullptr && step.op.weight != learner::kNone ? pass.products[s] : kNone;
            break;
          case OpKind::add:
          case OpKind::subtract:
            i.operation = Operation::slope_combine;
            i.scalar = step.op.kind == OpKind::subtract && k == 1 ? -1.0f : 1.0f;
            break;
          case OpKind::mean:
            i.operation = Operation::slope_mean;
            i.scalar = 1.0f / static_cast<float>(plan.width(value));
            break;
        }
        tape.push_back(i);
      }
    }
  }

  void add_tiles(const Pass& pass, std::size_t s, std::vector<Tile>& tiles) {
    const Step& step = pass.plan->steps[s];
    const int width = static_cast<int>(step.op.width);
    if (step.op.kind == OpKind::layer_norm) {
      if (step.op.weight != learner::kNone) add_vector(pass.products[s], width, step.op.weight, tiles);
      if (step.op.bias != learner::kNone) add_vector(pass.slope(step.out), width, step.op.bias, tiles);
    }
    if (step.op.kind != OpKind::linear) return;
    const int in = pass.plan->width(step.in[0]);
    const Rows& rows = pass.rows[static_cast<std::size_t>(step.in[0])];
    for (int first = 0; first < width; first += tape::kTileRows)
      for (int begin = 0; begin < in; begin += columns_per_tile) {
        Tile tile{};
        tile.first = first;
        tile.count = std::min(tape::kTileRows, width - first);
        tile.in = in;
        tile.begin = begin;
        tile.end = std::min(in, begin + columns_per_tile);
        tile.slopes = pass.slope(step.out) + first;
        tile.rows_stride = rows.stride;
        tile.rows = rows.offset;
        tile.weight = step.op.weight;
        tile.bias = step.op.bias;
        tiles.push_back(tile);
      }
  }

  static void add_vector(int slopes, int width, std::ptrdiff_t weight, std::vector<Tile>& tiles) {
    for (int first = 0; first < width; first += static_cast<int>(kVectorTile)) {
      Tile tile{};
      tile.first = first;
      tile.count = std::min(static_cast<int>(kVectorTile), width - first);
      tile.slopes = slopes + first;
      tile.weight = weight;
      tile.bias = kNone;
      tiles.push_back(tile);
    }
  }

  static Instruction load(int column, int out, int width, int scale) {
    Instruction i{};
    i.operation = Operation::load;
    i.column = column;
    i.in = scale;
    i.out = out;
    i.out_width = width;
    return i;
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
                     "rewards; a smaller learning rate or max_grad_norm may help. Its weights are not to be used: "
                     "--resume goes on from the last checkpoint.");
}

void throw_wrong_action(std::size_t actions, std::size_t position) {
  throw LearnerError("Actions must lie in [0, " + std::to_string(actions) +
                     "); found one that does not at position " + std::to_string(position) + " of the batch.");
}

DeviceBatch OwnBatch::of(DeviceQueue& queue, std::size_t rows, std::size_t observation_size,
                         std::size_t action_bytes) {
  const std::size_t bytes[5] = {observation_size * sizeof(float), action_bytes, sizeof(float),
                                observation_size * sizeof(float), sizeof(float)};
  if (rows != rows_) {
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

DeviceLearner::DeviceLearner(DeviceQueue& queue, LearnerModel model, LearnerCut cut)
    : queue_(queue), model_(std::move(model)), cut_(cut) {
  const std::size_t networks = model_.networks.size();
  if (model_.actor_critic ? networks < 2 || networks > 3 : networks != 1)
    throw LearnerError("A learner takes one network, or an actor and one or two critics; found " +
                       std::to_string(networks) + ".");
  for (const NetworkSource& network : model_.networks) Plan{network};
  // A CPU runs a work-group's lanes as one vector; a GPU wants more of them at once, and more groups.
  if (cut_.slices == 0) cut_.slices = queue_.is_cpu() ? 1 : 8;
  if (cut_.columns_per_tile == 0) cut_.columns_per_tile = queue_.is_cpu() ? kWholeRows : 64;
  if (cut_.slices < 1 || cut_.columns_per_tile < kLanes || cut_.columns_per_tile % kLanes != 0)
    throw LearnerError("A step takes at least 1 slice and tiles of a multiple of " + std::to_string(kLanes) +
                       " columns; found " + std::to_string(cut_.slices) + " and " +
                       std::to_string(cut_.columns_per_tile) + ".");
  kernels_ = compile(tape::kAdam);
  context_ = {queue_, 1, Placement::shared};
  device_optimizers_ = {queue_, 3, Placement::shared};
  totals_ = {queue_, 4, Placement::shared};
  scales_ = {queue_, std::max<std::size_t>(model_.scales.size(), 1), Placement::shared};
  std::copy(model_.scales.begin(), model_.scales.end(), scales_.data());
}

std::size_t DeviceLearner::action_bytes() const {
  return model_.actor_critic ? model_.action_size * sizeof(float) : sizeof(std::int64_t);
}

void DeviceLearner::set(const LearnerSettings& settings) {
  const bool rebuild = settings.double_q != settings_.double_q || settings.stochastic != settings_.stochastic ||
                       (settings.max_grad_norm > 0) != (settings_.max_grad_norm > 0);
  settings_ = settings;
  if (rebuild) rows_ = 0;
  tape::Context& context = context_[0];
  context.stochastic = settings.stochastic;
  context.saturation_penalty = settings.saturation_penalty;
  context.target_noise = settings.target_noise;
  context.noise_clip = settings.noise_clip;
  context.log_std_low = settings.log_std_low;
  context.log_std_high = settings.log_std_high;
  context.target_entropy = settings.target_entropy;
  context.max_grad_norm = settings.max_grad_norm;
  context.noise_seed = settings.noise_seed;
}

void DeviceLearner::set_optimizer(Which which, const OptimizerSettings& settings) {
  optimizers_[which] = settings;
  device_optimizers_[which] = on_device(settings);
  movers_[which] = compile(rule_of(settings));
}

std::shared_ptr<const Kernels> DeviceLearner::compile(int rule) {
  return queue_.compile("learner",
                        {"pearl_run_tape", "pearl_gradients", "pearl_move_weights", "pearl_move_temperature"},
                        {"-DPEARL_SLICES=" + std::to_string(cut_.slices), "-DPEARL_RULE=" + std::to_string(rule)});
}

DeviceBatch DeviceLearner::own_batch(std::size_t rows) {
  return own_.of(queue_, rows, model_.observation_size, action_bytes());
}

void DeviceLearner::set_batch(std::size_t rows, const DeviceBatch& batch) {
  if (rows != rows_) build(rows);
  tape::Context& context = context_[0];
  std::copy(batch.columns, batch.columns + 5, context.columns);
  context.weights = batch.weights;
  context.priorities = batch.priorities;
}

DeviceLearner::Phase DeviceLearner::upload(const std::vector<Instruction>& tape, const std::vector<Tile>& tiles) {
  Phase phase{{queue_, tape.size(), Placement::shared}, {queue_, tiles.size(), Placement::shared}};
  std::copy(tape.begin(), tape.end(), phase.tape.data());
  std::copy(tiles.begin(), tiles.end(), phase.tiles.data());
  return phase;
}

void DeviceLearner::build(std::size_t rows) {
  if (rows < 1) throw LearnerError("A batch needs at least one transition.");
  const std::size_t groups = (rows + kLanes - 1) / kLanes;
  Builder builder{groups * kLanes, cut_.columns_per_tile};
  std::vector<Instruction> first, second;
  std::vector<Tile> tiles, actor_tiles;
  const int observations = static_cast<int>(model_.observation_size), actions = static_cast<int>(model_.action_size);
  std::vector<Plan> plans;
  for (const NetworkSource& network : model_.networks) plans.emplace_back(network);

  if (!model_.actor_critic) {
    const Plan& plan = plans[0];
    const int next_input = builder.place(observations), input = builder.place(observations);
    first.push_back(Builder::load(3, next_input, observations, kNone));
    Pass next = builder.pass(plan, tape::kTarget, next_input, false);
    builder.forward(next, false, first);
    Pass chooser = next;
    if (settings_.double_q) {
      chooser = builder.pass(plan, tape::kOnline, next_input, false);
      builder.forward(chooser, false, first);
    }
    Pass trained = builder.pass(plan, tape::kOnline, input, true);
    Instruction loading = Builder::load(0, input, observations, kNone);
    trained.rows[0] = builder.keep(observations);
    Builder::keep_in(loading, trained.rows[0]);
    first.push_back(loading);
    builder.forward(trained, true, first);
    Instruction loss{};
    loss.operation = Operation::dqn_loss;
    loss.in = trained.output();
    loss.in_width = plan.output_width();
    loss.other = next.output();
    loss.extra = chooser.output();
    loss.out = trained.output_slope();
    first.push_back(loss);
    builder.backward(trained, false, first, &tiles);
  } else {
    const int critics = static_cast<int>(plans.size()) - 1;
    const int action_scale = 2 * observations, inputs = observations + actions;
    const auto acts = [&](const Pass& actor, int out, int draw, int log_density) {
      Instruction i{};
      i.operation = Operation::act;
      i.in = actor.output();
      i.out = out;
      i.column = draw;
      i.extra = log_density;
      return i;
    };
    // The critics: what the next action is worth, and what the one taken is.
    const int next_input = builder.place(inputs), input = builder.place(inputs), log_density = builder.place(1);
    first.push_back(Builder::load(3, next_input, observations, 0));
    const int chooser = model_.parameters[tape::kTargetActor] != nullptr ? tape::kTargetActor : tape::kActor;
    Pass next_actor = builder.pass(plans[0], chooser, next_input, false);
    builder.forward(next_actor, false, first);
    first.push_back(acts(next_actor, next_input + observations, 0, log_density));
    Instruction observation = Builder::load(0, input, observations, 0);
    Instruction action = Builder::load(1, input + observations, actions, action_scale);
    const Rows input_rows = builder.keep(inputs);
    Builder::keep_in(observation, input_rows);
    Builder::keep_in(action, {input_rows.offset + observations, input_rows.stride});
    first.push_back(observation);
    first.push_back(action);
    std::vector<Pass> judged, trained;
    for (int k = 0; k < critics; ++k) {
      judged.push_back(builder.pass(plans[static_cast<std::size_t>(k) + 1], tape::kTarget, next_input, false));
      builder.forward(judged.back(), false, first);
      trained.push_back(builder.pass(plans[static_cast<std::size_t>(k) + 1], tape::kOnline, input, true));
      trained.back().rows[0] = input_rows;
      builder.forward(trained.back(), true, first);
    }
    Instruction loss{};
    loss.operation = Operation::critic_loss;
    loss.in = trained[0].output();
    loss.other = judged[0].output();
    loss.out = trained[0].output_slope();
    loss.extra3 = log_density;
    if (critics == 2) {
      loss.extra = trained[1].output();
      loss.extra2 = judged[1].output();
      loss.out2 = trained[1].output_slope();
    }
    first.push_back(loss);
    for (const Pass& pass : trained) builder.backward(pass, false, first, &tiles);

    // The actor: what it says is judged by the critics as they are now; without entropy by the first alone.
    const int judges = settings_.stochastic ? critics : 1;
    Instruction seen = Builder::load(0, input, observations, 0);
    Pass actor = builder.pass(plans[0], tape::kActor, input, true);
    actor.rows[0] = builder.keep(observations);
    Builder::keep_in(seen, actor.rows[0]);
    second.push_back(seen);
    builder.forward(actor, true, second);
    second.push_back(acts(actor, input + observations, 1, log_density));
    for (int k = 0; k < judges; ++k) builder.forward(trained[static_cast<std::size_t>(k)], false, second);
    Instruction objective{};
    objective.operation = Operation::policy_loss;
    objective.in = trained[0].output();
    objective.other = log_density;
    objective.out = trained[0].output_slope();
    Instruction slopes{};
    slopes.operation = Operation::slope_act;
    slopes.in = trained[0].slope(0) + observations;
    slopes.other = actor.output();
    slopes.extra2 = input + observations;
    slopes.out = actor.output_slope();
    if (judges == 2) {
      objective.extra = trained[1].output();
      objective.out2 = trained[1].output_slope();
      slopes.extra = trained[1].slope(0) + observations;
    }
    second.push_back(objective);
    for (int k = 0; k < judges; ++k) builder.backward(trained[static_cast<std::size_t>(k)], true, second, nullptr);
    second.push_back(slopes);
    builder.backward(actor, false, second, &actor_tiles);
  }

  arena_ = {queue_, (static_cast<std::size_t>(builder.features) * groups + tape::kTileRows) * kLanes, Placement::device};
  kept_rows_ = {queue_, static_cast<std::size_t>(builder.row_floats), Placement::device};
  sums_ = {queue_, groups, Placement::device};
  squares_ = {queue_, std::max(tiles.size(), actor_tiles.size()), Placement::device};
  if (settings_.max_grad_norm > 0) {
    gradients_[0] = {queue_, model_.counts[tape::kOnline], Placement::device};
    if (model_.actor_critic) gradients_[1] = {queue_, model_.counts[tape::kActor], Placement::device};
  }
  phases_.clear();
  phases_.push_back(upload(first, tiles));
  if (model_.actor_critic) phases_.push_back(upload(second, actor_tiles));
  tape::Context& context = context_[0];
  std::copy(model_.parameters, model_.parameters + 4, context.parameters);
  context.arena = arena_.data();
  context.rows = kept_rows_.data();
  context.gradients[0] = gradients_[0].data();
  context.gradients[1] = gradients_[1].data();
  context.squares = squares_.data();
  context.sums = sums_.data();
  context.log_alpha = model_.log_alpha;
  context.scales = scales_.data();
  context.totals = totals_.data();
  context.arena_features = builder.features;
  context.batch = static_cast<std::int32_t>(rows);
  context.groups = static_cast<std::int32_t>(groups);
  context.observation_size = observations;
  context.action_size = actions;
  context.critics = static_cast<std::int32_t>(plans.size()) - 1;
  rows_ = rows;
  groups_ = groups;
}

tape::StepArguments DeviceLearner::advance(Which which) {
  return next_step(optimizers_[which], launched_[which]++);
}

void DeviceLearner::run(const Phase& phase, bool policy, Which which, std::int64_t step, float target) {
  const auto slices = static_cast<std::size_t>(cut_.slices);
  tape::Context* context = context_.data();
  queue_.launch_rows((*kernels_)["pearl_run_tape"], groups_, slices, kLanes, context,
                     static_cast<const Instruction*>(phase.tape.data()), static_cast<int>(phase.tape.size()),
                     static_cast<std::uint64_t>(step));
  const Tile* tiles = phase.tiles.data();
  if (settings_.max_grad_norm > 0)
    queue_.launch((*kernels_)["pearl_gradients"], phase.tiles.size(), kLanes, context, tiles, static_cast<int>(policy));
  const tape::StepArguments arguments = advance(which);
  queue_.launch((*movers_[which])["pearl_move_weights"], phase.tiles.size(), kLanes, context, tiles,
                static_cast<int>(phase.tiles.size()), static_cast<const tape::Optimizer*>(&device_optimizers_[which]),
                arguments.step_size, arguments.denominator, arguments.fresh, target, static_cast<int>(policy));
}

void DeviceLearner::launch(std::int64_t step) {
  const auto [moves, target] = moves_of(settings_, step);
  run(phases_[0], false, kMain, step, target);
  if (!model_.actor_critic || !moves) return;
  run(phases_[1], true, kActor, step, target);
  if (model_.log_alpha == nullptr || movers_[kTemperature] == nullptr) return;
  const tape::StepArguments arguments = advance(kTemperature);
  queue_.launch((*movers_[kTemperature])["pearl_move_temperature"], 1, kLanes, context_.data(),
                static_cast<const tape::Optimizer*>(&device_optimizers_[kTemperature]), arguments.step_size,
                arguments.denominator, arguments.fresh);
}

LearnerMetrics DeviceLearner::finish() {
  queue_.wait();
  tape::Context& context = context_[0];
  const std::int64_t done = context.steps, launched = launched_[kMain];
  LearnerMetrics metrics;
  metrics.steps = done;
  metrics.actor_steps = launched_[kActor];
  const double count = static_cast<double>(std::max<std::int64_t>(done, 1));
  metrics.loss = totals_[0] / count;
  metrics.td_error = totals_[1] / count;
  metrics.gradient_norm = totals_[2] / count;
  metrics.actor_gradient_norm = totals_[3] / static_cast<double>(std::max<std::int64_t>(metrics.actor_steps, 1));
  std::fill(totals_.data(), totals_.data() + 4, 0.0f);
  context.steps = 0;
  const bool failed = context.failure != 0;
  for (int which = 0; which < 3; ++which) {
    OptimizerSettings& optimizer = optimizers_[which];
    std::int64_t moved = launched_[which];
    // Of a run of steps that ended early, the others' share.
    if (failed && launched > 0) moved = moved * done / launched;
    if (optimizer.adam && optimizer.steps != nullptr) *optimizer.steps += static_cast<float>(moved);
    if (launched_[which] > 0) optimizer.fresh = false;
    launched_[which] = 0;
  }
  if (!failed) return metrics;
  const int failure = std::exchange(context.failure, 0), at = context.failed_at;
  if (failure == tape::kWrongAction)
    throw_wrong_action(static_cast<std::size_t>(Plan(model_.networks[0]).output_width()), static_cast<std::size_t>(at));
  throw_diverged(queue_.name());
}

}  // namespace pearl::device
