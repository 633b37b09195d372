#include "pearl/device/sum_tree_replay.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>
#include <utility>

#include "pearl/errors.hpp"
#include "pearl/quantise.hpp"
#include "pearl/replay_kernels.hpp"
#include "pearl/device/replay_batch.hpp"

namespace pearl::device {
namespace {

constexpr std::size_t kPadding = 16;
constexpr const char* kDevice = "this device";
constexpr std::size_t kDrawingLanes = 128;  // of a work-group, where many draw
constexpr const std::int32_t* kAlways = nullptr;  // whatever has failed
constexpr UpdateRefusal kNoRefusal{kNowhere, kNowhere, kNowhere};

std::size_t round_up(std::size_t count, std::size_t multiple) { return (count + multiple - 1) / multiple * multiple; }

std::size_t checked_capacity(std::int64_t capacity) {
  if (capacity >= 1 && capacity <= std::int64_t{1} << 36) return static_cast<std::size_t>(capacity);
  throw ReplayError("Replay capacity must lie in [1, 2**36]; found " + std::to_string(capacity) + ".");
}

unsigned checked_fanout(unsigned fanout, bool needed) {
  if (!needed || (fanout >= 2 && fanout <= 256 && std::has_single_bit(fanout))) return fanout;
  throw ReplayError("Fanout must be a power of two from 2 to 256; found " + std::to_string(fanout) + ".");
}

// Whether the slots are consecutive around a ring, so that none occurs twice.
bool in_turn(const std::int64_t* indices, std::size_t count, std::size_t capacity) {
  if (count > capacity) return false;
  const auto end = static_cast<std::int64_t>(capacity);
  for (std::size_t i = 1; i < count; ++i)
    if (indices[i] != indices[i - 1] + 1 && !(indices[i] == 0 && indices[i - 1] == end - 1)) return false;
  return true;
}

// The positions in a batch that take effect: of duplicate slots, the last one.
std::vector<std::size_t> lasting(const std::int64_t* indices, std::size_t count, std::size_t capacity) {
  std::vector<std::size_t> positions(count);
  std::iota(positions.begin(), positions.end(), std::size_t{0});
  if (in_turn(indices, count, capacity)) return positions;
  std::sort(positions.begin(), positions.end(), [&](std::size_t a, std::size_t b) {
    return indices[a] != indices[b] ? indices[a] < indices[b] : a > b;
  });
  const auto same = [&](std::size_t a, std::size_t b) { return indices[a] == indices[b]; };
  positions.erase(std::unique(positions.begin(), positions.end(), same), positions.end());
  return positions;
}

}  // namespace

BatchMemory::BatchMemory(DeviceQueue& queue, std::size_t count, Placement placement)
    : count_(count),
      room_(round_up(count, kPadding)),
      block_(queue, room_ * (sizeof(std::int64_t) + sizeof(float) + sizeof(std::uint32_t)), placement),
      leaves_(queue, room_, Placement::device),
      arrays_(queue, 1, Placement::device) {
  const SampledBatch arrays{indices(), weights(), generations(), leaves_.data()};
  queue.copy(&arrays, arrays_.data(), sizeof arrays);
}

SumTreeReplay::SumTreeReplay(std::shared_ptr<DeviceQueue> queue, std::int64_t capacity, unsigned fanout, double alpha,
                             std::uint64_t seed, const ReplayOptions& options)
    : queue_(std::move(queue)),
      capacity_(checked_capacity(capacity)),
      fanout_(checked_fanout(fanout, options.selection == Selection::kPrioritized)),
      prioritized_(options.selection == Selection::kPrioritized),
      stratified_(options.stratified),
      known_{.alpha = alpha, .seed = seed} {
  check_exponent("alpha", alpha);
  memory_.capacity = capacity_;
  memory_.seed = seed;
  memory_.shift = static_cast<std::uint32_t>(std::countr_zero(fanout));
  memory_.prioritized = prioritized_;
  memory_.initial = std::bit_cast<std::uint32_t>(options.initial_priority);
  memory_.epsilon = checked_epsilon(options.priority_epsilon);
  std::size_t sums = 0;
  if (prioritized_) {
    std::size_t nodes = capacity_;
    do {
      nodes = (nodes + fanout - 1) >> memory_.shift;
      memory_.offsets[memory_.levels] = sums;
      memory_.nodes[memory_.levels++] = nodes;
      sums += round_up(nodes, std::max(std::size_t{fanout}, kPadding));
    } while (nodes > 1);
    leaves_ = {*queue_, round_up(capacity_, std::max(std::size_t{fanout}, kPadding)), Placement::device};
  }
  sums_ = {*queue_, std::max<std::size_t>(sums, 1), Placement::device};
  slots_ = {*queue_, capacity_, Placement::device};
  progress_ = {*queue_, 1};
  draws_ = {*queue_, kMostAhead};
  refusal_ = {*queue_, 1, Placement::pinned};
  device_memory_ = {*queue_, 1, Placement::device};
  ReplayProgress progress{};
  progress.scale = kDefaultScale;
  progress.max_priority = std::bit_cast<std::uint32_t>(1.0f);
  set_progress(progress);
  refusal_[0] = kNoRefusal;
  memory_.leaves = leaves_.data();
  memory_.sums = sums_.data();
  memory_.total = sums_.data() + (prioritized_ ? memory_.offsets[memory_.levels - 1] : 0);
  memory_.slots = slots_.data();
  memory_.progress = progress_.there();
  memory_.alpha_q28 = exponent_q28(known_.alpha);
  publish();
  std::vector<std::string> kernels{"pearl_insert", "pearl_update", "pearl_retrieve", "pearl_sum_all"};
  if (queue_->team() > 1)
    kernels.insert(kernels.end(), {"pearl_draw", "pearl_weigh_rows"});
  else
    kernels.push_back("pearl_sample_rows");
  kernels_ = queue_->compile("sum_tree_replay", kernels);
}

void SumTreeReplay::require_open() const {
  if (closed_) throw ReplayError("The Replay Manager is closed.");
}

void SumTreeReplay::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  queue_->settle();
  leaves_ = {};
  sums_ = {};
  slots_ = {};
  written_ = {};
  host_batch_ = {};
  device_batch_ = {};
  inserted_ = {};
  given_ = {};
}

void SumTreeReplay::wait() const {
  queue_->wait();
  inserted_.busy = given_.busy = false;
}

// Waits, and brings what kernels keep to the host.
const ReplayProgress& SumTreeReplay::fetched() const {
  progress_.fetch(*queue_);
  wait();
  return progress_[0];
}

// While no kernel runs.
void SumTreeReplay::set_progress(const ReplayProgress& progress) {
  progress_[0] = progress;
  progress_.send(*queue_, 0, 1);
  wait();
}

// Copies the kernels' view of the replay to the device.
void SumTreeReplay::publish() { queue_->copy(&memory_, device_memory_.data(), sizeof memory_); }

template <class T>
std::vector<T> SumTreeReplay::copied(const T* array, std::size_t count) const {
  std::vector<T> copy(count);
  queue_->copy(array, copy.data(), count * sizeof(T));
  return copy;
}

SumTreeReplay::Staging& SumTreeReplay::staged(Staging& staging, std::size_t count) {
  if (staging.busy) wait();
  if (count > staging.indices.size())  // all arrays or none: the size of one tells that of the others
    staging = {{*queue_, count, Placement::pinned},
               {*queue_, count, Placement::pinned},
               {*queue_, count, Placement::pinned}};
  return staging;
}

void SumTreeReplay::insert(const std::int64_t* indices, const float* priorities, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_count(count, kDevice);
  check_indices(indices, count, capacity_);
  PriorityScan found{};
  if (priorities != nullptr) found = check_priorities(priorities, count);
  if (count == 0) return;
  found.largest += memory_.epsilon;
  Staging& staging = staged(inserted_, count);
  const std::vector<std::size_t> positions = lasting(indices, count, capacity_);
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::size_t at = positions[i], slot = static_cast<std::size_t>(indices[at]);
    const auto generation = std::max(static_cast<std::uint32_t>(known_.counters.inserts + at + 1), 1u);
    staging.indices[i] = indices[at];
    if (priorities != nullptr) staging.priorities[i] = raised(priorities[at], memory_.epsilon);
    staging.generations[i] = generation;
    if (slot >= generations_.size()) generations_.resize(slot + 1);
    if (std::exchange(generations_[slot], generation) != 0) continue;
    ++known_.filled;
    written_current_ = false;
  }
  known_.counters.inserts += count;
  staging.busy = true;
  queue_->launch((*kernels_)["pearl_insert"], 1, writing_lanes(positions.size()), device_memory_.data(),
                 staging.indices.data(), priorities != nullptr ? staging.priorities.data() : nullptr,
                 staging.generations.data(), std::uint64_t{positions.size()},
                 std::bit_cast<std::uint32_t>(found.largest), std::uint64_t{found.infinite}, known_.counters.inserts);
}

// Sends the device a list of the written slots, where there are gaps between them.
void SumTreeReplay::list_written() {
  const bool gaps = generations_.size() != known_.filled;
  if (written_current_ || (!gaps && memory_.written == nullptr)) return;
  const std::int64_t* list = nullptr;
  if (gaps) {
    std::vector<std::int64_t> slots;
    for (std::size_t slot = 0; slot < generations_.size(); ++slot)
      if (generations_[slot] != 0) slots.push_back(static_cast<std::int64_t>(slot));
    if (written_.size() < slots.size()) {
      wait();  // draws that were launched before may still read the list
      written_ = {*queue_, std::min(capacity_, 2 * slots.size()), Placement::device};
    }
    queue_->copy(slots.data(), written_.data(), slots.size() * sizeof slots[0]);
    list = written_.data();
  }
  memory_.written = list;
  publish();
  written_current_ = gaps;
}

void SumTreeReplay::begin_sample(std::size_t count, double beta) {
  check_exponent("beta", beta);
  require_open();
  check_count(count, kDevice);
  if (count < 1) throw ReplayError("batch_size must be at least 1; found 0.");
  if (known_.filled == 0) throw ReplayError("The replay is empty: insert before sampling.");
  list_written();
}

Draw SumTreeReplay::next_draw(std::size_t count, double beta) {
  known_.counters.samples += count;
  return {known_.call++, exponent_q28(beta)};
}

void SumTreeReplay::sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
                           std::uint32_t* generations) {
  const std::lock_guard lock(mutex_);
  begin_sample(count, beta);
  if (host_batch_.room() < count) host_batch_ = {*queue_, count, Placement::pinned};
  launch_sampling(host_batch_, count, {nullptr, next_draw(count, beta)}, nullptr, kAlways);
  last_ = {&host_batch_, count, static_cast<std::uint32_t>(known_.counters.inserts)};
  wait();
  std::copy_n(host_batch_.indices(), count, indices);
  std::copy_n(host_batch_.weights(), count, weights);
  std::copy_n(host_batch_.generations(), count, generations);
}

void SumTreeReplay::prepare_draws(std::size_t draws, std::size_t count, double beta) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (draws > kMostAhead) throw ReplayError("At most " + std::to_string(kMostAhead) + " draws are prepared at once.");
  if (std::exchange(prepared_, 0) > 0) wait();
  begin_draws(count, beta);
  for (; prepared_ < draws; ++prepared_) draws_[prepared_] = next_draw(count, beta);
  draws_.send(*queue_, 0, draws);
}

void SumTreeReplay::prepare_iteration(std::size_t count, double beta) {
  const std::lock_guard lock(mutex_);
  if (prepared_ == kMostAhead) {
    wait();
    prepared_ = 0;
  }
  begin_draws(count, beta);
  draws_[prepared_] = next_draw(count, beta);
  draws_.send_to(*queue_, prepared_++, 0);
  count_updates_locked(count);
}

void SumTreeReplay::begin_draws(std::size_t count, double beta) {
  begin_sample(count, beta);
  if (device_batch_.count() != count) device_batch_ = {*queue_, count, Placement::device};
  last_ = {&device_batch_, count, static_cast<std::uint32_t>(known_.counters.inserts)};
}

const BatchMemory& SumTreeReplay::launch_draw(std::size_t place, std::size_t count, ColumnStore* store,
                                              const std::int32_t* failure) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (store != nullptr && store->queue() != queue_)
    throw ReplayError("The Replay Manager and the Data Storage must share a queue, so that draws come before rows.");
  if (device_batch_.count() != count) throw ReplayError("A draw of " + std::to_string(count) + " items was not prepared.");
  launch_sampling(device_batch_, count, {draws_.there() + place, {}}, store, failure);
  return device_batch_;
}

// Where lanes are threads, many work-groups draw, and then weigh and gather: a single one would leave a GPU idle.
void SumTreeReplay::launch_sampling(const BatchMemory& batch, std::size_t count, const DrawArgument& draw,
                                    ColumnStore* store, const std::int32_t* failure) {
  const std::uint64_t stratum = stratified_ && count > 1 ? stratum_width(count) : 0;
  const RowBatch* const rows = store == nullptr ? nullptr : &store->device_batch(count);
  const RowCopy* const copies = rows == nullptr ? nullptr : rows->copies();
  const auto columns = static_cast<std::uint32_t>(store == nullptr ? 0 : store->row_bytes().size());
  if (queue_->team() > 1) {
    const std::size_t lanes = queue_->lanes(kDrawingLanes), items = lanes / queue_->team();
    queue_->launch((*kernels_)["pearl_draw"], (count + items - 1) / items, lanes, device_memory_.data(), batch.arrays(),
                   std::uint64_t{count}, stratum, draw.there, draw.own.call, failure);
    const std::size_t groups = store == nullptr ? 1 : store->copying_groups(count) * (columns + 1);
    queue_->launch((*kernels_)["pearl_weigh_rows"], groups, queue_->lanes(kMostLanes), batch.arrays(),
                   std::uint64_t{count}, draw.there, draw.own.beta_q28, copies, columns, failure);
    return;
  }
  const bool together = store != nullptr && store->fit_one_group(count);
  queue_->launch((*kernels_)["pearl_sample_rows"], 1, queue_->lanes(count), device_memory_.data(), batch.arrays(),
                 std::uint64_t{count}, stratum, draw.there, draw.own.call, draw.own.beta_q28, copies,
                 together ? columns : 0, failure);
  if (store != nullptr && !together) store->launch_gather(batch.indices(), count);
}

const BatchMemory* SumTreeReplay::device_batch() const {
  const std::lock_guard lock(mutex_);
  return device_batch_.count() > 0 ? &device_batch_ : nullptr;
}

std::size_t SumTreeReplay::update(const std::int64_t* indices, const float* priorities,
                                  const std::uint32_t* generations, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_count(count, kDevice);
  if (!prioritized_) {
    known_.counters.updates += count;
    return count;
  }
  if (count == 0) return 0;
  check_indices(indices, count, capacity_);
  check_priorities(priorities, count);
  std::size_t applied = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto slot = static_cast<std::size_t>(indices[i]);
    const std::uint32_t generation = slot < generations_.size() ? generations_[slot] : 0;
    if (generation == 0) throw_unwritten(indices[i], i);
    applied += generations == nullptr || generations[i] == generation;
  }
  Staging& staging = staged(given_, count);
  std::copy_n(indices, count, staging.indices.data());
  std::copy_n(priorities, count, staging.priorities.data());
  if (generations != nullptr) std::copy_n(generations, count, staging.generations.data());
  staging.busy = true;
  launch_update_locked(staging.indices.data(), staging.priorities.data(),
                       generations != nullptr ? staging.generations.data() : nullptr, count, kAlways);
  return applied;
}

void SumTreeReplay::launch_update(const std::int64_t* indices, const float* priorities,
                                  const std::uint32_t* generations, std::size_t count, const std::int32_t* failure) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_count(count, kDevice);
  if (prioritized_) launch_update_locked(indices, priorities, generations, count, failure);
}

void SumTreeReplay::launch_update_locked(const std::int64_t* indices, const float* priorities,
                                         const std::uint32_t* generations, std::size_t count,
                                         const std::int32_t* failure) {
  queue_->launch((*kernels_)["pearl_update"], 1, writing_lanes(count), device_memory_.data(), indices, priorities,
                 generations, std::uint64_t{count}, refusal_.data(), failure);
}

void SumTreeReplay::launch(const Recording& recording) {
  const std::lock_guard lock(mutex_);
  require_open();
  queue_->launch(recording);
}

void SumTreeReplay::count_updates(std::size_t count) {
  const std::lock_guard lock(mutex_);
  count_updates_locked(count);
}

void SumTreeReplay::count_updates_locked(std::size_t count) {
  if (!prioritized_) known_.counters.updates += count;  // else the kernels count
}

void SumTreeReplay::check() {
  const std::lock_guard lock(mutex_);
  require_open();
  wait();
  check_locked();
}

void SumTreeReplay::check_waited() {
  const std::lock_guard lock(mutex_);
  require_open();
  check_locked();
}

void SumTreeReplay::check_locked() {
  prepared_ = 0;
  const UpdateRefusal refusal = std::exchange(refusal_[0], kNoRefusal);
  const auto position = [](std::uint32_t at) { return "at position " + std::to_string(at) + " of a batch on the device"; };
  if (refusal.index != kNowhere)
    throw ReplayError("Index " + position(refusal.index) + " must lie in [0, " + std::to_string(capacity_) + ").");
  if (refusal.priority != kNowhere)
    throw PriorityError("Priorities must be at least 0 and not NaN; found one that is not, " +
                        position(refusal.priority) + ". That batch changed nothing.");
  if (refusal.slot != kNowhere)
    throw ReplayError("The index " + position(refusal.slot) +
                      " was never inserted: only written slots can be updated.");
}

void SumTreeReplay::retrieve(const std::int64_t* indices, float* priorities, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_count(count, kDevice);
  check_indices(indices, count, capacity_);
  if (count == 0) return;
  Staging& staging = staged(given_, count);
  std::copy_n(indices, count, staging.indices.data());
  queue_->launch((*kernels_)["pearl_retrieve"], 1, queue_->lanes(count), device_memory_.data(), staging.indices.data(),
                 staging.priorities.data(), std::uint64_t{count});
  wait();
  std::copy_n(staging.priorities.data(), count, priorities);
}

void SumTreeReplay::sum_all() {
  queue_->launch((*kernels_)["pearl_sum_all"], 1, queue_->team_lanes(capacity_), device_memory_.data());
  fetched();
}

void SumTreeReplay::set_alpha(double alpha) {
  check_exponent("alpha", alpha);
  const std::lock_guard lock(mutex_);
  require_open();
  fetched();
  known_.alpha = alpha;
  memory_.alpha_q28 = exponent_q28(alpha);
  publish();
  if (!prioritized_) return;
  const std::size_t end = generations_.size();
  const std::vector<ReplaySlot> slots = copied(slots_.data(), end);
  std::vector<float> priorities(end);
  std::transform(slots.begin(), slots.end(), priorities.begin(),
                 [](const ReplaySlot& slot) { return std::bit_cast<float>(slot.priority); });
  ReplayProgress progress = progress_[0];
  progress.scale = highest_scale(replay_kernels().scan(priorities.data(), end).largest, memory_.alpha_q28);
  if (progress.scale < kDefaultScale) ++progress.rescales;
  std::vector<std::uint32_t> leaves(end);
  replay_kernels().quantise(priorities.data(), end, memory_.alpha_q28, progress.scale, leaves.data());
  progress.large = sum_of_large(leaves.data(), end);
  set_progress(progress);
  queue_->copy(leaves.data(), leaves_.data(), end * sizeof leaves[0]);
  sum_all();
}

ReplayState SumTreeReplay::state_locked() const {
  const ReplayProgress& progress = fetched();
  ReplayState state = known_;
  state.scale = progress.scale;
  state.max_priority = std::bit_cast<float>(progress.max_priority);
  if (prioritized_) state.counters.updates = progress.updates;
  state.counters.stale = progress.stale;
  state.counters.saturated = progress.saturated;
  state.counters.rescales = progress.rescales;
  state.counters.recoveries = progress.recoveries;
  state.looked_at = progress.looked_at;
  state.total = prioritized_ ? copied(memory_.total, 1)[0] : state.filled;
  return state;
}

ReplayState SumTreeReplay::state() const {
  const std::lock_guard lock(mutex_);
  require_open();
  return state_locked();
}

ReplayStatistics SumTreeReplay::statistics() const {
  const std::lock_guard lock(mutex_);
  require_open();
  ReplayStatistics statistics;
  statistics.state = state_locked();
  const std::size_t filled = statistics.state.filled;
  if (prioritized_) {
    std::size_t positive = 0;
    for (const std::uint32_t leaf : copied(leaves_.data(), generations_.size())) {
      ++statistics.histogram[static_cast<std::size_t>(std::bit_width(leaf))];
      positive += leaf != 0;
    }
    statistics.histogram[0] = filled - positive;  // the loop counted unwritten slots there too
  }
  std::uint64_t times = 0;
  for (const ReplaySlot& slot : copied(slots_.data(), generations_.size())) times += std::min(slot.times, kTimesMax);
  statistics.samples_per_item = static_cast<double>(times) / static_cast<double>(std::max<std::size_t>(filled, 1));
  if (last_.count == 0) return statistics;
  const std::vector<float> weights = copied(last_.batch->weights(), last_.count);
  const std::vector<std::uint32_t> generations = copied(last_.batch->generations(), last_.count);
  describe_batch(weights.data(), generations.data(), last_.count, last_.inserts, statistics);
  return statistics;
}

ReplayState SumTreeReplay::save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves,
                                std::uint16_t* times, std::vector<std::int64_t>*) const {
  const std::lock_guard lock(mutex_);
  require_open();
  const ReplayState state = state_locked();
  const std::vector<ReplaySlot> slots = copied(slots_.data(), capacity_);
  for (std::size_t i = 0; i < capacity_; ++i) {
    generations[i] = slots[i].generation;
    if (priorities != nullptr) priorities[i] = std::bit_cast<float>(slots[i].priority);
    if (times != nullptr) times[i] = static_cast<std::uint16_t>(std::min(slots[i].times, kTimesMax));
  }
  if (prioritized_ && leaves != nullptr) queue_->copy(leaves_.data(), leaves, capacity_ * sizeof *leaves);
  return state;
}

void SumTreeReplay::load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
                         const std::uint32_t* leaves, const std::uint16_t* times, const std::int64_t*, std::size_t) {
  const std::lock_guard lock(mutex_);
  require_open();
  wait();
  known_ = state;
  known_.counters.exhausted = 0;
  ReplayProgress progress{};
  progress.updates = state.counters.updates;
  progress.stale = state.counters.stale;
  progress.saturated = state.counters.saturated;
  progress.rescales = state.counters.rescales;
  progress.recoveries = state.counters.recoveries;
  progress.looked_at = state.looked_at;
  progress.inserts = known_.counters.inserts;
  if (prioritized_) progress.large = sum_of_large(leaves, capacity_);
  progress.scale = static_cast<std::int32_t>(state.scale);
  progress.max_priority = std::bit_cast<std::uint32_t>(state.max_priority);
  generations_.clear();
  std::vector<ReplaySlot> slots(capacity_);
  for (std::size_t i = 0; i < capacity_; ++i) {
    slots[i] = {prioritized_ ? std::bit_cast<std::uint32_t>(priorities[i]) : 0, generations[i],
                times != nullptr ? std::uint32_t{times[i]} : 0, 0};
    if (generations[i] == 0) continue;
    ++progress.filled;
    generations_.resize(i + 1);
    generations_[i] = generations[i];
  }
  known_.filled = progress.filled;
  set_progress(progress);
  memory_.seed = state.seed;
  memory_.alpha_q28 = exponent_q28(known_.alpha);
  publish();
  queue_->copy(slots.data(), slots_.data(), capacity_ * sizeof slots[0]);
  last_ = {};
  written_current_ = false;
  if (!prioritized_) return;
  queue_->copy(leaves, leaves_.data(), capacity_ * sizeof *leaves);
  sum_all();
}

}  // namespace pearl::device
