#include "fpga_replay.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "pearl/errors.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/device/replay_batch.hpp"

namespace pearl::device {

using fpga::Command;
using fpga::Held;
using fpga::Item;
using fpga::LearnerContext;
using fpga::Operation;
using fpga::Summary;

namespace {

constexpr const char* kDevice = "an FPGA";

}  // namespace

FpgaReplay::Staging::Staging(SyclQueue& queue, std::size_t count)
    : command(queue, 2, Placement::pinned),
      summary(queue, 2, Placement::pinned),
      items(queue, count, Placement::pinned),
      held(queue, count, Placement::pinned),
      weights(queue, count, Placement::pinned) {}

FpgaReplay::FpgaReplay(const std::shared_ptr<SyclQueue>& queue, std::int64_t capacity, unsigned fanout, double alpha,
                       std::uint64_t seed, bool stratified, float initial_priority, float priority_epsilon,
                       std::chrono::duration<double> patience)
    : queue_(queue),
      shape_(TreeShape::of(capacity, fanout)),
      stratified_(stratified),
      initial_(initial_priority),
      epsilon_(checked_epsilon(priority_epsilon)),
      progress_{.alpha = (check_exponent("alpha", alpha), alpha), .seed = seed, .scale = kDefaultScale},
      written_(shape_.capacity),
      staging_(std::make_unique<Staging>(*queue, std::min<std::size_t>(shape_.capacity, 1024))),
      autorun_(std::make_shared<Autorun>(queue, replay_program(shape_, kEmulatedPipeItems), patience)),
      patience_(patience) {}

FpgaReplay::~FpgaReplay() {
  try {
    close();
  } catch (const Error&) {  // a stall, which an earlier call has reported
  }
}

void FpgaReplay::require_open() const {
  if (closed_) throw ReplayError("The Replay Manager is closed.");
  autorun_->require_sound();  // kernels that hang still use memory that a larger batch would replace
}

void FpgaReplay::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  try {
    if (!autorun_->stalled()) stop_stages();
  } catch (const Error&) {
    static_cast<void>(staging_.release());
    throw;
  }
  if (autorun_->stalled())
    static_cast<void>(staging_.release());  // kernels that hang still use it
  else
    staging_.reset();
  written_ = {};
  last_ = {};
}

void FpgaReplay::stop_stages() {
  request(command(Operation::stop, 1));
  autorun_->join();
}

std::shared_ptr<Autorun> FpgaReplay::join(const AutorunProgram& program) {
  const std::lock_guard lock(mutex_);
  require_open();
  const std::vector<Held> slots = held(end_);
  stop_stages();
  try {
    autorun_ = std::make_shared<Autorun>(queue_, program, patience_);
  } catch (...) {
    closed_ = true;  // its own stages have ended
    throw;
  }
  load_tree(slots);
  return autorun_;
}

FpgaReplay::Staging& FpgaReplay::stage(std::size_t count) const {
  const std::size_t room = staging_->items.size();
  if (count > room) staging_ = std::make_unique<Staging>(*queue_, std::max(count, 2 * room));
  return *staging_;
}

Command FpgaReplay::command(Operation operation, std::size_t count) const {
  Command command{};
  command.operation = operation;
  command.count = count;
  command.seed = progress_.seed;
  command.call = progress_.call;
  command.stratified = stratified_;
  command.scale = static_cast<std::int32_t>(progress_.scale);
  command.alpha_q28 = exponent_q28(progress_.alpha);
  command.epsilon = epsilon_;
  return command;
}

Summary FpgaReplay::request(const Command& command) const {
  Staging& staging = *staging_;
  staging.command[0] = command;
  if (command.operation != Operation::load)
    autorun_->launch(kCollect, static_cast<const Command*>(staging.command.data()), staging.held.data(),
                     staging.weights.data(), staging.summary.data(), static_cast<const LearnerContext*>(nullptr));
  autorun_->launch(kFeed, static_cast<const Command*>(staging.command.data()),
                   static_cast<const Item*>(staging.items.data()), static_cast<LearnerContext*>(nullptr));
  autorun_->wait(command.count);
  return staging.summary[0];
}

// The contents of the slots at `indices`, in the staging.
const Held* FpgaReplay::held_at(const std::int64_t* indices, std::size_t count) const {
  Staging& staging = stage(count);
  for (std::size_t i = 0; i < count; ++i) staging.items[i] = {0, static_cast<std::uint32_t>(indices[i]), 0, 0};
  request(command(Operation::retrieve, count));
  return staging.held.data();
}

// The contents of the first `count` slots.
std::vector<Held> FpgaReplay::held(std::size_t count) const {
  if (count == 0) return {};
  std::vector<std::int64_t> all(count);
  std::iota(all.begin(), all.end(), std::int64_t{0});
  const Held* found = held_at(all.data(), count);
  return {found, found + count};
}

// Writes every slot, and the sums above them.
void FpgaReplay::load_tree(std::vector<Held> slots) {
  slots.resize(shape_.capacity);
  Staging& staging = stage(shape_.capacity);
  std::vector<std::uint64_t> sums(shape_.capacity);
  large_ = 0;
  for (std::size_t i = 0; i < shape_.capacity; ++i) {
    const Held& slot = slots[i];
    sums[i] = slot.leaf;
    large_ += large(slot.leaf);
    staging.items[i] = {slot.leaf | std::uint64_t{slot.times} << 32, static_cast<std::uint32_t>(i), slot.priority,
                        slot.generation};
  }
  for (unsigned level = shape_.depth;; --level) {
    Command load = command(Operation::load, sums.size());
    load.level = static_cast<std::uint8_t>(level);
    request(load);
    if (level == 0) break;
    std::vector<std::uint64_t> above((sums.size() + (std::size_t{1} << shape_.shift) - 1) >> shape_.shift);
    for (std::size_t i = 0; i < sums.size(); ++i) above[i >> shape_.shift] += sums[i];
    sums = std::move(above);
    for (std::size_t i = 0; i < sums.size(); ++i) staging.items[i] = {sums[i], static_cast<std::uint32_t>(i), 0, 0};
  }
  progress_.total = sums[0];
}

// Lowers the scale where `priority`, which is finite, does not fit.
void FpgaReplay::fit_scale(float priority) {
  if (!(priority > 0.0f)) return;
  const int excess = excess_bits(priority, exponent_q28(progress_.alpha), static_cast<int>(progress_.scale));
  if (excess == 0) return;
  set_scale(held(end_), static_cast<int>(progress_.scale) - excess);
  ++progress_.counters.rescales;
}

// As in pearl::SumTreeReplay.
void FpgaReplay::recover_scale() {
  if (progress_.scale == kDefaultScale || large_ != 0) return;
  const std::uint64_t writes = progress_.counters.inserts + progress_.counters.updates;
  if (writes - progress_.looked_at < progress_.filled) return;
  progress_.looked_at = writes;
  std::vector<Held> slots = held(end_);
  const int highest = highest_scale(slots);
  if (highest <= progress_.scale) return;
  set_scale(std::move(slots), highest);
  ++progress_.counters.recoveries;
}

int FpgaReplay::highest_scale(const std::vector<Held>& slots) const {
  float largest = 0.0f;
  for (const Held& slot : slots)
    if (slot.priority < kInfinityBits) largest = std::max(largest, std::bit_cast<float>(slot.priority));
  return pearl::highest_scale(largest, exponent_q28(progress_.alpha));
}

void FpgaReplay::set_scale(std::vector<Held> slots, int scale) {
  const std::int64_t alpha_q28 = exponent_q28(progress_.alpha);
  for (Held& slot : slots) slot.leaf = quantise(std::bit_cast<float>(slot.priority), alpha_q28, scale);
  load_tree(std::move(slots));
  progress_.scale = scale;
}

void FpgaReplay::insert(const std::int64_t* indices, const float* priorities, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_count(count, kDevice);
  check_indices(indices, count, shape_.capacity);
  PriorityScan found{};
  if (priorities != nullptr) found = check_priorities(priorities, count);
  if (count == 0) return;
  found.largest = raised(found.largest, epsilon_);
  const float initial = initial_ != kInitialMax ? initial_ : progress_.max_priority;
  fit_scale(priorities != nullptr ? found.largest : initial);
  Staging& staging = stage(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto generation = std::max(static_cast<std::uint32_t>(progress_.counters.inserts + i + 1), 1u);
    const float priority = priorities != nullptr ? raised(priorities[i], epsilon_) : initial;
    staging.items[i] = {0, static_cast<std::uint32_t>(indices[i]), std::bit_cast<std::uint32_t>(priority), generation};
  }
  const Summary done = request(command(Operation::insert, count));
  for (std::size_t i = 0; i < count; ++i) {
    const auto slot = static_cast<std::size_t>(indices[i]);
    written_[slot] = true;
    end_ = std::max(end_, slot + 1);
  }
  progress_.counters.inserts += count;
  progress_.counters.saturated += found.infinite;
  progress_.max_priority = std::max(progress_.max_priority, found.largest);
  progress_.filled += done.added;
  progress_.total += done.change;
  large_ += done.large;
  recover_scale();
}

// For the case that all written slots have zero priority: the host draws slots, and the device returns their contents.
void FpgaReplay::stage_visits(std::size_t count) {
  std::vector<std::uint32_t> written;
  for (std::size_t slot = 0; slot < end_; ++slot)
    if (written_[slot]) written.push_back(static_cast<std::uint32_t>(slot));
  const std::uint64_t width = stratified_ && count > 1 ? stratum_width(count) : 0;
  for (std::size_t i = 0; i < count; ++i)
    staging_->items[i] = {
        0, written[mulhi64(uniform_at(progress_.seed, progress_.call, i, width), written.size())], 0, 0};
}

// Remembers the batch in the staging.
void FpgaReplay::sampled(std::size_t count) {
  last_.slots.resize(count);
  last_.generations.resize(count);
  last_.weights.assign(staging_->weights.data(), staging_->weights.data() + count);
  for (std::size_t i = 0; i < count; ++i) {
    last_.slots[i] = staging_->held[i].slot;
    last_.generations[i] = staging_->held[i].generation;
  }
  last_.inserts = static_cast<std::uint32_t>(progress_.counters.inserts);
  ++progress_.call;
  progress_.counters.samples += count;
}

void FpgaReplay::sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
                        std::uint32_t* generations) {
  const std::lock_guard lock(mutex_);
  check_exponent("beta", beta);
  require_open();
  check_count(count, kDevice);
  if (count < 1) throw ReplayError("batch_size must be at least 1; found 0.");
  if (progress_.filled == 0) throw ReplayError("The replay is empty: insert before sampling.");
  const Staging& staging = stage(count);
  if (progress_.total == 0) {
    stage_visits(count);
    request(command(Operation::visit, count));
    std::fill_n(staging.weights.data(), count, 1.0f);
  } else {
    Command sample = command(Operation::sample, count);
    sample.beta_q28 = exponent_q28(beta);
    request(sample);
  }
  sampled(count);
  std::copy(last_.slots.begin(), last_.slots.end(), indices);
  std::copy(last_.generations.begin(), last_.generations.end(), generations);
  std::copy(last_.weights.begin(), last_.weights.end(), weights);
}

// The largest finite priority that an update will apply.
float FpgaReplay::largest_fresh(const std::int64_t* indices, const float* priorities,
                                const std::uint32_t* generations, std::size_t count) const {
  const Held* held = held_at(indices, count);
  float largest = 0.0f;
  for (std::size_t i = 0; i < count; ++i) {
    const bool fresh = held[i].generation == generations[i];
    if (fresh && std::isfinite(priorities[i])) largest = std::max(largest, raised(priorities[i], epsilon_));
  }
  return largest;
}

std::size_t FpgaReplay::update(const std::int64_t* indices, const float* priorities,
                               const std::uint32_t* generations, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  return update_locked(indices, priorities, generations, count);
}

std::size_t FpgaReplay::update_locked(const std::int64_t* indices, const float* priorities,
                                      const std::uint32_t* generations, std::size_t count) {
  check_count(count, kDevice);
  check_indices(indices, count, shape_.capacity);
  const PriorityScan found = check_priorities(priorities, count);
  for (std::size_t i = 0; i < count; ++i)
    if (!written_[static_cast<std::size_t>(indices[i])]) throw_unwritten(indices[i], i);
  if (count == 0) return 0;
  float largest = raised(found.largest, epsilon_);
  // A stale priority must not lower the scale: where one could, ask the device which ones are fresh.
  if (generations != nullptr && largest > 0.0f &&
      excess_bits(largest, exponent_q28(progress_.alpha), static_cast<int>(progress_.scale)) > 0)
    largest = largest_fresh(indices, priorities, generations, count);
  fit_scale(largest);
  Staging& staging = stage(count);
  for (std::size_t i = 0; i < count; ++i)
    staging.items[i] = {0, static_cast<std::uint32_t>(indices[i]),
                        std::bit_cast<std::uint32_t>(raised(priorities[i], epsilon_)),
                        generations != nullptr ? generations[i] : 0};
  Command update = command(Operation::update, count);
  update.checked = generations != nullptr;
  return updated(request(update), count);
}

std::size_t FpgaReplay::updated(Summary done, std::size_t count) {
  progress_.counters.updates += done.applied;
  progress_.counters.stale += count - done.applied;
  progress_.counters.saturated += done.infinite;
  progress_.max_priority = std::max(progress_.max_priority, std::bit_cast<float>(done.highest));
  progress_.total += done.change;
  large_ += done.large;
  recover_scale();
  return done.applied;
}

void FpgaReplay::train(std::size_t count, double beta, LearnerContext* context) {
  const std::lock_guard lock(mutex_);
  check_exponent("beta", beta);
  require_open();
  if (progress_.filled == 0) throw ReplayError("The replay is empty: insert before training.");
  Staging& staging = stage(count);
  const bool all_zero = progress_.total == 0;
  if (all_zero) stage_visits(count);
  Command& sample = staging.command[0];
  sample = command(all_zero ? Operation::visit : Operation::sample, count);
  sample.beta_q28 = exponent_q28(beta);
  Command& update = staging.command[1];
  update = command(Operation::update, count);
  sample.trains = update.trains = true;
  for (const std::size_t which : {0, 1}) {
    autorun_->launch(kCollect, static_cast<const Command*>(&staging.command[which]), staging.held.data(),
                     staging.weights.data(), &staging.summary[which], static_cast<const LearnerContext*>(context));
    autorun_->launch(kFeed, static_cast<const Command*>(&staging.command[which]),
                     static_cast<const Item*>(staging.items.data()), context);
  }
  autorun_->launch(kFinish, context);
  autorun_->wait(2 * count);
  if (all_zero) std::fill_n(staging.weights.data(), count, 1.0f);
  sampled(count);
  if (context->unfit == 0) {
    updated(staging.summary[1], count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i)
    if (!(context->priorities[i] >= 0.0f)) return;  // the Learner diverged, and its caller reports it
  const std::vector<std::int64_t> slots(last_.slots.begin(), last_.slots.end());
  const std::vector<std::uint32_t> generations = last_.generations;
  const std::vector<float> priorities(context->priorities, context->priorities + count);
  update_locked(slots.data(), priorities.data(), generations.data(), count);
}

void FpgaReplay::retrieve(const std::int64_t* indices, float* priorities, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_count(count, kDevice);
  check_indices(indices, count, shape_.capacity);
  if (count == 0) return;
  const Held* held = held_at(indices, count);
  for (std::size_t i = 0; i < count; ++i) priorities[i] = std::bit_cast<float>(held[i].priority);
}

void FpgaReplay::set_alpha(double alpha) {
  check_exponent("alpha", alpha);
  const std::lock_guard lock(mutex_);
  require_open();
  progress_.alpha = alpha;
  std::vector<Held> slots = held(end_);
  const int highest = highest_scale(slots);
  set_scale(std::move(slots), highest);
  progress_.counters.rescales += highest < kDefaultScale;
}

ReplayState FpgaReplay::state() const {
  const std::lock_guard lock(mutex_);
  require_open();
  return progress_;
}

ReplayStatistics FpgaReplay::statistics() const {
  const std::lock_guard lock(mutex_);
  require_open();
  ReplayStatistics statistics;
  statistics.state = progress_;
  std::uint64_t times = 0;
  for (const Held& slot : held(end_)) {
    times += slot.times;
    if (slot.generation != 0) ++statistics.histogram[static_cast<std::size_t>(std::bit_width(slot.leaf))];
  }
  statistics.samples_per_item =
      static_cast<double>(times) / static_cast<double>(std::max<std::uint64_t>(progress_.filled, 1));
  if (!last_.weights.empty())
    describe_batch(last_.weights.data(), last_.generations.data(), last_.weights.size(), last_.inserts, statistics);
  return statistics;
}

ReplayState FpgaReplay::save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves,
                             std::uint16_t* times, std::vector<std::int64_t>*) const {
  const std::lock_guard lock(mutex_);
  require_open();
  std::vector<Held> slots = held(end_);
  slots.resize(shape_.capacity);
  for (std::size_t i = 0; i < shape_.capacity; ++i) {
    const Held& slot = slots[i];
    priorities[i] = std::bit_cast<float>(slot.priority);
    generations[i] = slot.generation;
    leaves[i] = slot.leaf;
    times[i] = static_cast<std::uint16_t>(slot.times);
  }
  return progress_;
}

void FpgaReplay::load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
                      const std::uint32_t* leaves, const std::uint16_t* times, const std::int64_t*, std::size_t) {
  const std::lock_guard lock(mutex_);
  require_open();
  std::vector<Held> slots(shape_.capacity);
  progress_ = state;
  progress_.filled = 0;
  end_ = 0;
  for (std::size_t i = 0; i < shape_.capacity; ++i) {
    slots[i] = {static_cast<std::uint32_t>(i), leaves[i], std::bit_cast<std::uint32_t>(priorities[i]), generations[i],
                times[i]};
    written_[i] = generations[i] != 0;
    if (!written_[i]) continue;
    ++progress_.filled;
    end_ = i + 1;
  }
  last_ = {};
  load_tree(std::move(slots));
}

}  // namespace pearl::device
