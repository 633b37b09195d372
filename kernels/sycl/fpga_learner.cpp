#include "fpga_learner.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl::device {
namespace {

// The emulator runs that many stages at once, in addition to a Replay Manager of 16 levels and the bridges.
constexpr std::size_t kMostStages = 100;
constexpr int kMostRows = 1 << 16;

// UF of each layer.
void set_unroll(LearnerShape& shape, const std::vector<std::vector<int>>& unroll) {
  if (unroll.size() != 1 && unroll.size() != shape.networks.size())
    throw LearnerError("Give unroll factors of " + std::to_string(shape.networks.size()) +
                       " networks, the actor first; found those of " + std::to_string(unroll.size()) + ".");
  for (std::size_t n = 0; n < shape.networks.size(); ++n) {
    const std::vector<int>& factors = unroll[unroll.size() == 1 ? 0 : n];
    auto& layers = shape.networks[n];
    if (factors.size() != 1 && factors.size() != layers.size())
      throw LearnerError("Network " + std::to_string(n) + " takes an unroll factor for each of its " +
                         std::to_string(layers.size()) + " layers; found " + std::to_string(factors.size()) + ".");
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const int factor = factors[factors.size() == 1 ? 0 : l];
      if (factor < 1 || !std::has_single_bit(static_cast<unsigned>(factor)))
        throw LearnerError("An unroll factor must be a power of two; found " + std::to_string(factor) + ".");
      layers[l].unroll = factor;
    }
  }
}

LearnerShape shape_of(const LearnerModel& model, const PipelineCut& cut) {
  LearnerShape shape;
  for (const NetworkSource& network : model.networks) shape.networks.push_back(chain_of(network));
  if (cut.copies < 0)
    throw LearnerError("A pipeline takes at least one copy; found " + std::to_string(cut.copies) + ".");
  set_unroll(shape, cut.unroll);
  shape.actor_critic = model.actor_critic;
  shape.stochastic = model.log_alpha != nullptr;
  shape.observations = static_cast<int>(model.observation_size);
  shape.actions = static_cast<int>(model.action_size);
  shape.rows = 1;
  // For the largest number of stages.
  shape.double_q = true;
  shape.learns_temperature = shape.stochastic;
  const auto stages = [&shape] { return learner_program(shape, 1).stages.size(); };
  shape.copies = cut.copies == 0 ? 2 : std::min(cut.copies, static_cast<int>(kMostStages));
  while (shape.copies > 1 && stages() > kMostStages) --shape.copies;
  if (stages() > kMostStages)
    throw LearnerError("A pipeline of these networks has " + std::to_string(stages()) + " stages; at most " +
                       std::to_string(kMostStages) + " run at once. Use networks of fewer layers.");
  return shape;
}

}  // namespace

FpgaLearner::FpgaLearner(const std::shared_ptr<SyclQueue>& queue, LearnerModel model, PipelineCut cut)
    : queue_(queue),
      model_(std::move(model)),
      cut_(cut),
      shape_(shape_of(model_, cut)),
      memory_(std::make_unique<Memory>()) {
  shape_.rows = 0;
  memory_->context = {*queue, 1, Placement::pinned};
  memory_->scales = {*queue, std::max<std::size_t>(model_.scales.size(), 1), Placement::pinned};
  std::copy(model_.scales.begin(), model_.scales.end(), memory_->scales.data());
}

FpgaLearner::~FpgaLearner() {
  try {
    close();
  } catch (const Error&) {  // a stall, which an earlier call has reported
  }
  if (autorun_ != nullptr) static_cast<void>(memory_.release());  // kernels that hang still use it
}

void FpgaLearner::close() {
  if (autorun_ == nullptr || autorun_->stalled()) return;
  if (replay_ == nullptr) {
    context().batch = 0;  // tells the stages to stop
    autorun_->launch(kSubmit, static_cast<const fpga::LearnerContext*>(&context()));
    autorun_->wait(0);
    autorun_->join();
  }
  autorun_ = nullptr;
}

void FpgaLearner::set_optimizer(LearnerWhich which, const OptimizerSettings& settings) {
  if (which == kTemperature && !shape_.stochastic) throw LearnerError("This Learner has no temperature to train.");
  optimizers_[which] = settings;
  trains_[which] = true;
}

void FpgaLearner::require_sound() const {
  if (!failure_.empty()) throw DeviceError(failure_);
  if (autorun_ != nullptr) autorun_->require_sound();
}

DeviceBatch FpgaLearner::own_batch(std::size_t rows) {
  require_sound();  // kernels that hang still use memory that this may replace
  return memory_->own.of(*queue_, rows, model_.row_bytes());
}

void FpgaLearner::set_batch(std::size_t rows, const DeviceBatch& batch) {
  if (rows < 1 || rows > kMostRows)
    throw LearnerError("A batch on an FPGA has 1 to " + std::to_string(kMostRows) + " transitions; found " +
                       std::to_string(rows) + ".");
  fpga::LearnerContext& context = this->context();
  std::copy(batch.columns, batch.columns + 5, context.columns);
  context.importance = batch.weights;
  context.priorities = batch.priorities;
  context.batch = static_cast<std::uint32_t>(rows);
  rows_ = rows;
}

LearnerShape FpgaLearner::shape_for(std::size_t rows) const {
  LearnerShape shape = shape_;
  shape.rows = static_cast<std::uint32_t>(rows);
  shape.double_q = !model_.actor_critic && settings_.double_q;
  shape.learns_temperature = trains_[kTemperature];
  for (int which = 0; which < 3; ++which) shape.rules[which] = rule_of(optimizers_[which]);
  return shape;
}

std::string FpgaLearner::source(std::uint32_t rows) const {
  return learner_program(shape_for(rows), kEmulatedPipeItems).text;
}

// Fills the context for step number `step`.
void FpgaLearner::prepare(std::int64_t step) {
  fpga::LearnerContext& context = this->context();
  std::copy(model_.parameters, model_.parameters + 4, context.vectors);
  const auto [policy, target] = moves_of(settings_, step);
  moves_policy_ = policy && model_.actor_critic;
  for (int which = 0; which < 3; ++which) {
    if (!trains_[which]) continue;
    context.optimizers[which] = on_device(optimizers_[which]);
    context.steps[which] = next_step(optimizers_[which], 0);
    context.steps[which].target = target;
  }
  context.moves_policy = moves_policy_;
  context.scales = memory_->scales.data();
  context.step = static_cast<std::uint64_t>(step);
  copy_settings(settings_, context);
  context.log_alpha = model_.log_alpha;
  context.temperature = model_.log_alpha == nullptr ? 0.0f : std::exp(*model_.log_alpha);
  context.norms[0] = context.norms[1] = context.loss = context.td_error = 0.0f;
  context.unfit = 0;
}

void FpgaLearner::launch_step(std::int64_t step) {
  if (replay_ != nullptr)
    throw LearnerError("This Learner is joined to its Replay Manager, and trains on its samples alone.");
  const LearnerShape wanted = shape_for(std::max<std::size_t>(rows_, autorun_ ? shape_.rows : 0));
  if (autorun_ == nullptr || wanted != shape_) {
    const std::uint32_t batch = context().batch;
    close();
    context().batch = batch;
    try {
      autorun_ = std::make_shared<Autorun>(queue_, learner_program(wanted, kEmulatedPipeItems),
                                           std::chrono::duration<double>(cut_.timeout_s));
    } catch (const DeviceError& error) {
      failure_ = error.what();
      throw;
    }
    shape_ = wanted;
  }
  prepare(step);
  autorun_->launch(kResolve, memory_->context.data());
  autorun_->launch(kSubmit, static_cast<const fpga::LearnerContext*>(memory_->context.data()));
}

LearnerMetrics FpgaLearner::finish() {
  if (replay_ == nullptr) autorun_->wait(rows_);
  const fpga::LearnerContext& context = this->context();
  LearnerMetrics metrics;
  const double rows = static_cast<double>(rows_);
  metrics.loss = context.loss / rows;
  metrics.td_error = context.td_error / rows;
  const bool clips = settings_.max_grad_norm > 0;
  metrics.gradient_norm = clips ? context.norms[fpga::kCritic] : 0.0;
  metrics.actor_gradient_norm = clips ? context.norms[fpga::kPolicy] : 0.0;
  const bool policy_sound = !moves_policy_ || std::isfinite(context.norms[fpga::kPolicy]);
  if (!std::isfinite(context.norms[fpga::kCritic]) || !policy_sound) {
    if (!model_.actor_critic) {
      const auto actions = static_cast<std::size_t>(shape_.networks[0].back().outputs);
      for (std::size_t row = 0; row < rows_; ++row) {
        const std::size_t from = replay_ == nullptr ? row : replay_->last_slot(row);
        std::int64_t action;
        // Joined to a Replay Manager, the column is in the Data Storage, whose memory only the device can read.
        queue_->copy(static_cast<const char*>(context.columns[1]) + from * sizeof action, &action, sizeof action);
        if (action < 0 || static_cast<std::size_t>(action) >= actions) throw_wrong_action(actions, row);
      }
    }
    throw_diverged(queue_->name());
  }
  for (int which = 0; which < 3; ++which) {
    if (!trains_[which] || (which != kMain && !moves_policy_)) continue;
    OptimizerSettings& optimizer = optimizers_[which];
    if (optimizer.adam && optimizer.steps != nullptr) *optimizer.steps += 1.0f;
    optimizer.fresh = false;
  }
  metrics.steps = 1;
  metrics.actor_steps = moves_policy_;
  return metrics;
}

void FpgaLearner::join(const std::shared_ptr<FpgaReplay>& replay, const std::shared_ptr<ColumnStore>& storage,
                       std::size_t rows) {
  const RowBytes wanted = model_.row_bytes();
  if (!std::equal(wanted.begin(), wanted.end(), storage->row_bytes().begin(), storage->row_bytes().end()))
    throw LearnerError("The columns of the Data Storage are not those of this Learner's transitions.");
  if (storage->capacity() != replay->capacity())
    throw LearnerError("Replay Manager and Data Storage differ in capacity: " + std::to_string(replay->capacity()) +
                       " and " + std::to_string(storage->capacity()) + ".");
  close();
  memory_->priorities = {*queue_, rows, Placement::pinned};
  DeviceBatch batch;
  for (std::size_t i = 0; i < 5; ++i) batch.columns[i] = storage->column(i);
  batch.priorities = memory_->priorities.data();
  set_batch(rows, batch);
  shape_ = shape_for(rows);
  autorun_ = replay->join(training_program(replay->shape(), shape_, kEmulatedPipeItems));
  memory_->storage = storage;
  replay_ = replay;
}

LearnerMetrics FpgaLearner::train(std::int64_t step, double beta) {
  if (replay_ == nullptr) throw LearnerError("This Learner is not joined to a Replay Manager.");
  if (shape_for(shape_.rows) != shape_)
    throw LearnerError("An optimizer's rule, or double_q, changed after the pipeline was created. Create it again.");
  prepare(step);
  for (std::size_t i = 0; i < 5; ++i) context().columns[i] = memory_->storage->column(i);  // ReplayError once closed
  replay_->train(rows_, beta, memory_->context.data());
  return finish();
}

}  // namespace pearl::device
