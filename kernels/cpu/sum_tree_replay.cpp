#include "pearl/sum_tree_replay.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/replay_kernels.hpp"
#include "pearl/systematic_sampling.hpp"

namespace pearl {

void check_indices(const std::int64_t* indices, std::size_t count, std::size_t capacity) {
  if (replay_kernels().all_below(indices, count, capacity)) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (static_cast<std::uint64_t>(indices[i]) < capacity) continue;
    throw ReplayError("Index at position " + std::to_string(i) + " must lie in [0, " + std::to_string(capacity) +
                      "); found " + std::to_string(indices[i]) + ".");
  }
}

PriorityScan check_priorities(const float* priorities, std::size_t count) {
  const PriorityScan found = replay_kernels().scan(priorities, count);
  if (found.valid) return found;
  constexpr std::size_t kNamed = 5;
  std::ostringstream named;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (priorities[i] >= 0.0f) continue;
    if (wrong++ < kNamed) named << (wrong > 1 ? ", " : "") << i;
  }
  throw PriorityError("Priorities must be at least 0 and not NaN; found " + std::to_string(wrong) +
                      " that are not, at position " + named.str() + (wrong > kNamed ? ", ..." : "") +
                      ". Nothing was changed.");
}

double check_exponent(const char* name, double exponent) {
  if (exponent >= 0.0 && exponent <= kExponentMax) return exponent;
  std::ostringstream message;
  message << name << " must lie in [0, 4]; found " << exponent << ".";
  throw ReplayError(message.str());
}

float checked_epsilon(float epsilon) {
  if (epsilon == 0.0f || (epsilon >= kEpsilonMin && epsilon <= 1.0f)) return epsilon;
  throw ReplayError("priority_epsilon must be 0, or lie in [1e-30, 1]; found " + std::to_string(epsilon) + ".");
}

namespace {

std::size_t checked_capacity(std::int64_t capacity) {
  // The sum of 2^36 leaves of 28 bits just fits 64 bits.
  if (capacity >= 1 && capacity <= std::int64_t{1} << 36) return static_cast<std::size_t>(capacity);
  throw ReplayError("Replay capacity must lie in [1, 2**36]; found " + std::to_string(capacity) + ".");
}

}  // namespace

SumTreeReplay::SumTreeReplay(std::int64_t capacity, unsigned fanout, double alpha, std::uint64_t seed,
                             const ReplayOptions& options)
    : capacity_(checked_capacity(capacity)),
      fanout_(fanout),
      selection_(options.selection),
      prioritized_(selection_ == Selection::kPrioritized || selection_ == Selection::kTopK),
      by_time_(selection_ == Selection::kFifo || selection_ == Selection::kLifo),
      stratified_(options.stratified),
      replacement_(options.replacement),
      limit_(options.max_times_sampled),
      limited_((selection_ == Selection::kPrioritized || selection_ == Selection::kUniform) &&
               (!replacement_ || limit_ != 0)),
      initial_(options.initial_priority),
      epsilon_(checked_epsilon(options.priority_epsilon)),
      alpha_(check_exponent("alpha", alpha)),
      alpha_q28_(exponent_q28(alpha)),
      seed_(seed),
      scale_(kDefaultScale),
      workers_(options.workers),
      slots_(capacity_),
      times_(capacity_) {
  if (prioritized_ || limited_) tree_ = make_sum_tree(capacity_, fanout_);
  if (selection_ == Selection::kTopK) maxima_ = std::make_unique<MaxTree>(capacity_);
  if (by_time_) {
    newer_ = AlignedArray<std::int64_t>(capacity_ + 1);
    older_ = AlignedArray<std::int64_t>(capacity_ + 1);
    newer_[capacity_] = older_[capacity_] = static_cast<std::int64_t>(capacity_);
  }
}

void SumTreeReplay::require_open() const {
  if (closed_) throw ReplayError("The Replay Manager is closed.");
}

void SumTreeReplay::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  tree_.reset();
  maxima_.reset();
  newer_ = {};
  older_ = {};
  slots_ = {};
  times_ = {};
  written_ = {};
}

void SumTreeReplay::link_newest(std::size_t slot) {
  const auto end = static_cast<std::int64_t>(capacity_);
  const auto at = static_cast<std::int64_t>(slot);
  const std::int64_t before = older_[capacity_];
  older_[slot] = before;
  newer_[slot] = end;
  newer_[static_cast<std::size_t>(before)] = at;
  older_[capacity_] = at;
}

void SumTreeReplay::unlink(std::size_t slot) {
  newer_[static_cast<std::size_t>(older_[slot])] = newer_[slot];
  older_[static_cast<std::size_t>(newer_[slot])] = older_[slot];
}

void SumTreeReplay::bump(std::size_t slot) {
  Slot& item = slots_[slot];
  if (item.generation == 0) {
    ++filled_;
    end_ = std::max(end_, slot + 1);
    written_current_ = false;
  } else if (exhausted(slot)) {
    --exhausted_now_;
  } else if (by_time_) {
    unlink(slot);
  }
  if (by_time_) link_newest(slot);
  item.generation = std::max(static_cast<std::uint32_t>(++counters_.inserts), 1u);
  times_sum_ -= times_[slot];
  times_[slot] = 0;
}

// Ranks a slot among the largest by its exact priority: bits of non-negative floats sort as the floats do.
void SumTreeReplay::rank(std::size_t slot) {
  const Slot& item = slots_[slot];
  const auto bits = std::bit_cast<std::int32_t>(item.priority);
  const bool counts = item.generation != 0 && !exhausted(slot);
  maxima_->set(slot, counts ? static_cast<std::uint32_t>(std::max(bits, 0)) + 1 : 0);
}

void SumTreeReplay::retire(std::size_t slot) {
  ++exhausted_now_;
  ++counters_.exhausted;
  if (by_time_) unlink(slot);
  if (tree_) {
    const auto index = static_cast<std::int64_t>(slot);
    const std::uint32_t none = 0;
    tree_->assign(&index, &none, 1);
  }
  if (maxima_) rank(slot);
}

// Sums whole units of 2^-40, so that the mean does not depend on the order of updates.
void SumTreeReplay::account(float priority, bool added) {
  const auto bits = std::bit_cast<std::int32_t>(priority);
  if (bits <= 0 || bits >= 0x7F800000) return;
  constexpr double kMost = 0x1p90;
  const auto units = static_cast<unsigned __int128>(std::min(static_cast<double>(priority) * 0x1p40, kMost));
  mean_sum_ = added ? mean_sum_ + units : mean_sum_ - units;
  mean_count_ = added ? mean_count_ + 1 : mean_count_ - 1;
}

float SumTreeReplay::initial_priority() const {
  if (initial_ == kInitialMax) return max_priority_;
  if (initial_ != kInitialMean) return initial_;
  if (mean_count_ == 0) return 1.0f;
  const unsigned __int128 mean = std::max<unsigned __int128>(mean_sum_ / mean_count_, 1);
  return static_cast<float>(static_cast<double>(mean) * 0x1p-40);
}

void SumTreeReplay::store(const std::int64_t* indices, const float* priorities, std::size_t count) {
  if (initial_ == kInitialMean) {
    for (std::size_t i = 0; i < count; ++i) {
      Slot& slot = slots_[static_cast<std::size_t>(indices[i])];
      account(slot.priority, false);
      account(slot.priority = priorities[i], true);
    }
  }
  if (limit_ != 0) {
    for (std::size_t i = 0; i < count; ++i)
      if (exhausted(static_cast<std::size_t>(indices[i]))) values_[i] = 0;
  }
  for (std::size_t i = 0; i < count; ++i) slots_[static_cast<std::size_t>(indices[i])].priority = priorities[i];
  if (maxima_)
    for (std::size_t i = 0; i < count; ++i) rank(static_cast<std::size_t>(indices[i]));
  tree_->assign(indices, values_.data(), count);
}

const float* SumTreeReplay::raise(const float* priorities, std::size_t count, PriorityScan& found) {
  if (epsilon_ == 0.0f) return priorities;
  raised_.resize(count);
  for (std::size_t i = 0; i < count; ++i) raised_[i] = raised(priorities[i], epsilon_);
  found.largest += epsilon_;  // with no finite priority, at most 1: fits any scale, raises no maximum
  return raised_.data();
}

void SumTreeReplay::fit_scale(float largest) {
  if (!(largest > 0.0f)) return;
  const int excess = excess_bits(largest, alpha_q28_, scale_);
  if (excess == 0) return;
  set_scale(scale_ - excess);
  ++counters_.rescales;
}

// Raises the scale again once the large priority that lowered it is gone. It scans all slots only after as many writes
// as there are slots: amortised, a constant time per write.
void SumTreeReplay::recover_scale() {
  if (scale_ == kDefaultScale || tree_->large() != 0) return;
  const std::uint64_t writes = counters_.inserts + counters_.updates;
  if (writes - looked_at_ < filled_) return;
  looked_at_ = writes;
  const int highest = highest_scale();
  if (highest <= scale_) return;
  set_scale(highest);
  ++counters_.recoveries;
}

// The highest scale that fits every item that may be sampled.
int SumTreeReplay::highest_scale() const {
  float largest = 0.0f;
  for (std::size_t i = 0; i < end_; ++i)
    if (slots_[i].priority <= std::numeric_limits<float>::max() && !exhausted(i))
      largest = std::max(largest, slots_[i].priority);
  return pearl::highest_scale(largest, alpha_q28_);
}

void SumTreeReplay::set_scale(int scale) {
  scale_ = scale;
  std::uint32_t* leaves = tree_->leaves();
  constexpr std::size_t kChunk = 1024;
  float priorities[kChunk];
  for (std::size_t first = 0; first < end_; first += kChunk) {
    const std::size_t count = std::min(kChunk, end_ - first);
    for (std::size_t i = 0; i < count; ++i) priorities[i] = slots_[first + i].priority;
    replay_kernels().quantise(priorities, count, alpha_q28_, scale_, leaves + first);
    for (std::size_t i = first; limit_ != 0 && i < first + count; ++i)
      if (exhausted(i)) leaves[i] = 0;
  }
  tree_->watch_large(scale_ < kDefaultScale);
  tree_->rebuild();
}

void SumTreeReplay::admit(const PriorityScan& found) {
  counters_.saturated += found.infinite;
  max_priority_ = std::max(max_priority_, found.largest);
  fit_scale(found.largest);
}

// The fast path of a ring, which inserts into consecutive slots: writes slots and sums without checking each. Returns
// false if the batch does not qualify.
bool SumTreeReplay::insert_range(const std::int64_t* indices, const float* priorities, std::size_t count) {
  const bool simple = plain() || (!prioritized_ && !tree_ && !by_time_);
  if (!simple || count < 2 || end_ != filled_) return false;
  const auto first = static_cast<std::size_t>(indices[0]);
  const auto before = static_cast<std::uint32_t>(counters_.inserts);
  if (first > end_ || count >= ~before) return false;  // a gap, or generations wrap
  std::uint64_t mismatch = 0;
  for (std::size_t i = 0; i < count; ++i) mismatch |= static_cast<std::uint64_t>(indices[i]) ^ (first + i);
  if (mismatch != 0) return false;
  if (prioritized_) tree_->assign_range(first, values_.data(), count);
  Slot* slots = slots_.data() + first;
  for (std::size_t i = 0; i < count; ++i)
    slots[i] = {prioritized_ ? priorities[i] : 0.0f, before + static_cast<std::uint32_t>(i) + 1};
  std::uint16_t* times = times_.data() + first;
  times_sum_ -= std::accumulate(times, times + count, std::uint64_t{0});
  std::fill_n(times, count, std::uint16_t{0});
  counters_.inserts += count;
  filled_ = end_ = std::max(end_, first + count);
  return true;
}

void SumTreeReplay::insert(const std::int64_t* indices, const float* priorities, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_indices(indices, count, capacity_);
  PriorityScan found{};
  if (priorities != nullptr) found = check_priorities(priorities, count);
  if (!prioritized_) {
    if (insert_range(indices, nullptr, count)) return;
    for (std::size_t i = 0; i < count; ++i) bump(static_cast<std::size_t>(indices[i]));
    values_.assign(tree_ ? count : 0, 1);
    if (tree_) tree_->assign(indices, values_.data(), count);
    return;
  }
  if (count == 0) return;
  values_.resize(count);
  if (priorities != nullptr) {
    priorities = raise(priorities, count, found);
    admit(found);
    replay_kernels().quantise(priorities, count, alpha_q28_, scale_, values_.data());
  } else {
    const float initial = initial_priority();
    fit_scale(initial);
    std::fill(values_.begin(), values_.end(), quantise(initial, alpha_q28_, scale_));
    kept_priorities_.assign(count, initial);
    priorities = kept_priorities_.data();
  }
  if (!insert_range(indices, priorities, count)) {
    for (std::size_t i = 0; i < count; ++i) bump(static_cast<std::size_t>(indices[i]));
    store(indices, priorities, count);
  }
  recover_scale();
}

std::int64_t SumTreeReplay::written(std::size_t rank) {
  if (end_ == filled_) return static_cast<std::int64_t>(rank);  // no gaps, as in a ring
  if (!written_current_) {
    written_.clear();
    for (std::size_t slot = 0; slot < end_; ++slot)
      if (slots_[slot].generation != 0) written_.push_back(static_cast<std::int64_t>(slot));
    written_current_ = true;
  }
  return written_[rank];
}

// Fills targets_ with numbers uniform in [0, 2^64); if stratified, the k-th lies in the k-th of `count` equal slices.
void SumTreeReplay::random(std::size_t count, bool stratified) {
  targets_.resize(count);
  for_lanes(seed_, call_, stratified ? stratum_width(count) : 0, 0, count,
            [&](std::uint64_t lane, std::uint64_t x) { targets_[lane] = x; });
}

void SumTreeReplay::take_in_order(std::size_t count, std::int64_t* indices) {
  if (by_time_) {
    const AlignedArray<std::int64_t>& next = selection_ == Selection::kFifo ? newer_ : older_;
    std::size_t at = capacity_;
    for (std::size_t i = 0; i < count; ++i) {
      indices[i] = next[at];
      at = static_cast<std::size_t>(indices[i]);
    }
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t slot = maxima_->top();
    indices[i] = static_cast<std::int64_t>(slot);
    maxima_->set(slot, 0);
  }
  for (std::size_t i = 0; i < count; ++i) rank(static_cast<std::size_t>(indices[i]));
}

// Draws one item after another, without those already used up; then restores the tree. values_ gets the leaves.
void SumTreeReplay::draw_in_turn(SumTree& tree, std::size_t count, std::int64_t* indices) {
  random(count, false);
  const std::uint32_t none = 0;
  std::size_t drawn = 0;
  for (; drawn < count && tree.total() > 0; ++drawn) {
    std::uint64_t target = mulhi64(tree.total(), targets_[drawn]);
    tree.find(&target, 1, 0, indices + drawn, values_.data() + drawn);
    const auto slot = static_cast<std::size_t>(indices[drawn]);
    if (limit_ != 0) ++times_[slot];
    const bool last = exhausted(slot);
    if (last || !replacement_) tree.assign(indices + drawn, &none, 1);
  }
  tree.assign(indices, values_.data(), drawn);
  if (limit_ != 0)
    for (std::size_t i = 0; i < drawn; ++i) --times_[static_cast<std::size_t>(indices[i])];
  if (drawn < count) throw_used_up(count, drawn);
}

void SumTreeReplay::throw_used_up(std::size_t count, std::size_t draws) const {
  throw ReplayError("A batch of " + std::to_string(count) + " cannot be sampled: " + std::to_string(draws) +
                    " draws are left until every item that can be drawn was sampled " + std::to_string(limit_) +
                    " times.");
}

// Draws from a tree where an item may be used up within the batch (see limited_). values_ gets what importance weights
// are computed from.
void SumTreeReplay::draw_limited(SumTree& tree, std::size_t count, std::int64_t* indices) {
  values_.resize(count);
  if (!stratified_ || (replacement_ && limit_ != 1)) return draw_in_turn(tree, count, indices);
  if (count > tree.positive()) throw_used_up(count, tree.positive());
  random(2 * count, false);
  sample_systematically(tree, count, targets_, indices, values_.data());
}

// Every selection except the plain draw by priority: draw() does that.
void SumTreeReplay::select(std::size_t count, std::int64_t* indices) {
  const bool any_positive = prioritized_ && tree_->total() > 0;
  const std::size_t available = any_positive ? tree_->positive() : sampleable();
  const bool drawn = selection_ == Selection::kPrioritized || selection_ == Selection::kUniform;
  if ((!drawn || !replacement_) && count > available)
    throw ReplayError("A batch of " + std::to_string(count) + " cannot be sampled without repetition: " +
                      std::to_string(available) + " items can be sampled.");
  if (!drawn) return take_in_order(count, indices);
  if (!limited_) {
    random(count, stratified_);
    for (std::size_t i = 0; i < count; ++i) indices[i] = written(mulhi64(filled_, targets_[i]));
    return;
  }
  if (any_positive || !prioritized_) return draw_limited(*tree_, count, indices);
  const std::unique_ptr<SumTree> ones = make_sum_tree(capacity_, fanout_);
  for (std::size_t i = 0; i < end_; ++i) ones->leaves()[i] = slots_[i].generation != 0 && !exhausted(i);
  ones->rebuild();
  draw_limited(*ones, count, indices);
}

inline void SumTreeReplay::prefetch_tally(std::int64_t slot) const {
  __builtin_prefetch(&slots_[static_cast<std::size_t>(slot)], 0, 3);
  __builtin_prefetch(&times_[static_cast<std::size_t>(slot)], 1, 3);
}

// Adds a selected batch to `batch` and reads its generations. Threads may tally at once, each its own slots.
void SumTreeReplay::tally(const std::int64_t* indices, std::uint32_t* generations, std::size_t count,
                          LastBatch& batch) {
  const auto now = static_cast<std::uint32_t>(counters_.inserts);
  LastBatch found;
  const bool limited = limit_ != 0;  // then one thread tallies
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kTalliedAhead < count) prefetch_tally(indices[i + kTalliedAhead]);
    const auto slot = static_cast<std::size_t>(indices[i]);
    const std::uint32_t generation = slots_[slot].generation;
    if (generations != nullptr) generations[i] = generation;
    const std::uint32_t age = now - generation;
    found.ages += age;
    found.age_max = std::max(found.age_max, age);
    const std::uint16_t counts = times_[slot] < kTimesMax;
    times_[slot] = static_cast<std::uint16_t>(times_[slot] + counts);
    found.counted += counts;
    if (limited && times_[slot] == limit_) retire(slot);
  }
  found.count = count;
  batch.add(found);
}

void SumTreeReplay::add_weights(const float* weights, std::size_t count, LastBatch& batch) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto units = static_cast<std::uint64_t>(static_cast<std::int32_t>(weights[i] * 0x1p24f));
    batch.weights += units;
    batch.squares += (units * units) >> 16;
  }
}

bool SumTreeReplay::may_share(std::size_t count) const {
  return workers_.workers() > 1 && count >= 2 * kChunk;
}

void SumTreeReplay::draw(std::size_t count, double beta, std::int64_t* indices, float* weights,
                         std::uint32_t* generations) {
  const ReplayKernels& kernels = replay_kernels();
  const std::uint64_t total = tree_->total();
  values_.resize(count);
  targets_.resize(count);
  if (!stratified_) {
    random(count, false);
    for (std::size_t i = 0; i < count; ++i) targets_[i] = mulhi64(total, targets_[i]);
  }
  const bool shareable = may_share(count);
  const std::size_t parts =
      shareable && draws_.begin() ? std::min<std::size_t>(count / kChunk, 4 * std::size_t{workers_.workers()}) : 1;
  const auto edge = [&](std::size_t part) { return part == parts ? count : count / parts * part & ~std::size_t{1}; };
  drawn_.assign(parts, {});
  workers_.run(parts, [&](std::size_t part) {
    const std::size_t first = edge(part);
    const std::size_t size = edge(part + 1) - first;
    std::uint64_t* targets = targets_.data() + first;
    if (stratified_) kernels.targets(seed_, call_, count, first, size, total, targets);
    tree_->find(targets, size, stratified_ ? count : 0, indices + first, values_.data() + first);
    if (weights != nullptr) drawn_[part].smallest = kernels.smallest(values_.data() + first, size);
  });
  // Targets ascend, so equal slots are neighbours: a chunk begins where the slot changes.
  const auto begins = [&](std::size_t part) {
    std::size_t at = edge(part);
    while (at > 0 && at < count && indices[at] == indices[at - 1]) ++at;
    return at;
  };
  const std::int64_t beta_q28 = exponent_q28(beta);
  std::uint32_t least = ~0u;
  for (const Drawn& part : drawn_) least = std::min(least, part.smallest);
  smallest_ = least;
  workers_.run(parts, [&](std::size_t part) {
    const std::size_t first = edge(part);
    const std::size_t end = edge(part + 1);
    if (generations != nullptr)
      for (std::size_t i = first; i < std::min(end, first + kTalliedAhead); ++i) prefetch_tally(indices[i]);
    if (weights != nullptr) {
      kernels.weights(values_.data() + first, end - first, least, beta_q28, weights + first);
      add_weights(weights + first, end - first, drawn_[part].batch);
    }
    if (generations == nullptr || (parts > 1 && !stratified_)) return;
    const std::size_t from = begins(part);
    tally(indices + from, generations + from, begins(part + 1) - from, drawn_[part].batch);
  });
  if (generations != nullptr && parts > 1 && !stratified_) tally(indices, generations, count, drawn_[0].batch);
  last_ = {};
  for (const Drawn& part : drawn_) last_.add(part.batch);
  times_sum_ += last_.counted;
  if (shareable) draws_.end(count);
}

void SumTreeReplay::sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
                           std::uint32_t* generations) {
  check_exponent("beta", beta);
  const std::lock_guard lock(mutex_);
  require_open();
  if (count < 1) throw ReplayError("batch_size must be at least 1; found 0.");
  if (filled_ == 0) throw ReplayError("The replay is empty: insert before sampling.");
  if (sampleable() == 0)
    throw ReplayError("All " + std::to_string(filled_) + " items were sampled " + std::to_string(limit_) +
                      " times: insert before sampling again.");
  const bool by_priority = selection_ == Selection::kPrioritized && tree_->total() > 0;
  sampled_mass_ = {};
  if (by_priority) sampled_mass_.mass = std::ldexp(static_cast<double>(tree_->total()), -scale_);
  if (!prioritized_) sampled_mass_ = {static_cast<double>(filled_), 1.0};
  if (by_priority && !limited_) {
    draw(count, beta, indices, weights, generations);
  } else {
    select(count, indices);
    last_ = {};
    if (by_priority && weights != nullptr) {
      const ReplayKernels& kernels = replay_kernels();
      smallest_ = kernels.smallest(values_.data(), count);
      kernels.weights(values_.data(), count, smallest_, exponent_q28(beta), weights);
      add_weights(weights, count, last_);
    } else {
      last_.weights = std::uint64_t{count} << 24;
      last_.squares = std::uint64_t{count} << 32;
      if (weights != nullptr) std::fill(weights, weights + count, 1.0f);
    }
    if (generations != nullptr || limit_ != 0) tally(indices, generations, count, last_);
    times_sum_ += last_.counted;
  }
  if (by_priority && weights != nullptr) sampled_mass_.least = std::ldexp(static_cast<double>(smallest_), -scale_);
  ++call_;
  counters_.samples += count;
}

bool SumTreeReplay::all_written(const std::int64_t* indices, std::size_t count) const {
  return end_ == filled_ && replay_kernels().all_below(indices, count, end_);
}

// Updates one part of a batch, whose slots are written and whose priorities fit the scale, and prefetches the next part.
void SumTreeReplay::update_part(const Part& part, const Part& ahead, std::size_t batch, Applied& done) {
  std::int64_t kept[SumTree::kPart];
  float values[SumTree::kPart];
  std::uint32_t leaves[SumTree::kPart];
  for (std::size_t i = 0; i < ahead.count; ++i)
    __builtin_prefetch(&slots_[static_cast<std::size_t>(ahead.slots[i])], 1, 3);
  const std::int64_t* slots = part.slots;
  const float* priorities = part.priorities;
  std::size_t count = part.count;
  if (part.generations == nullptr) {
    for (std::size_t i = 0; i < count; ++i) slots_[static_cast<std::size_t>(slots[i])].priority = priorities[i];
  } else {
    std::size_t current = 0;
    for (std::size_t i = 0; i < part.count; ++i) {
      Slot& slot = slots_[static_cast<std::size_t>(slots[i])];
      const bool fresh = slot.generation == part.generations[i];
      slot.priority = fresh ? priorities[i] : slot.priority;
      kept[current] = slots[i];
      values[current] = priorities[i];
      current += fresh;
    }
    if (current < count) {
      slots = kept;
      priorities = values;
      count = current;
    }
    const PriorityScan found = replay_kernels().scan(priorities, count);
    done.largest = std::max(done.largest, found.largest);
    done.infinite += found.infinite;
  }
  done.count += count;
  replay_kernels().quantise(priorities, count, alpha_q28_, scale_, leaves);
  done.grown.add(tree_->assign_part(slots, leaves, count, batch, ahead.slots, ahead.count));
}

SumTreeReplay::Applied SumTreeReplay::update_all(const Part& batch) {
  const auto part = [&](std::size_t start) {
    start = std::min(start, batch.count);
    return Part{batch.slots + start, batch.priorities + start,
                batch.generations == nullptr ? nullptr : batch.generations + start,
                std::min(SumTree::kPart, batch.count - start)};
  };
  Applied done;
  update_part(part(batch.count), part(0), batch.count, done);
  for (std::size_t start = 0; start < batch.count; start += SumTree::kPart)
    update_part(part(start), part(start + SumTree::kPart), batch.count, done);
  return done;
}

// Updates the items of a batch whose slots lie in [first, end).
SumTreeReplay::Applied SumTreeReplay::update_range(const Part& batch, std::size_t first, std::size_t end) {
  struct Buffer {
    std::int64_t slots[SumTree::kPart];
    float priorities[SumTree::kPart];
    std::uint32_t generations[SumTree::kPart];
  };
  Buffer buffers[2];
  std::size_t at = 0;
  const auto fill = [&](Buffer& buffer) {
    std::size_t count = 0;
    for (; count < SumTree::kPart && at < batch.count; ++at) {
      buffer.slots[count] = batch.slots[at];
      buffer.priorities[count] = batch.priorities[at];
      if (batch.generations != nullptr) buffer.generations[count] = batch.generations[at];
      count += static_cast<std::size_t>(batch.slots[at]) - first < end - first;
    }
    return Part{buffer.slots, buffer.priorities, batch.generations == nullptr ? nullptr : buffer.generations, count};
  };
  Applied done;
  Part part = fill(buffers[0]);
  update_part({}, part, batch.count, done);
  for (std::size_t turn = 1; part.count > 0; ++turn) {
    const Part ahead = fill(buffers[turn % 2]);
    update_part(part, ahead, batch.count, done);
    part = ahead;
  }
  return done;
}

// The usual case in training: every slot is written, every priority fits the scale, nothing can fail.
std::size_t SumTreeReplay::update_written(const Part& batch, const PriorityScan& found) {
  // Each worker gets whole runs of slots, so that workers share neither leaves nor the sums above them.
  const std::size_t granule = tree_->granule(batch.count);
  const std::size_t granules = (capacity_ + granule - 1) / granule;
  const bool shareable = may_share(batch.count);
  const std::size_t parts = shareable && updates_.begin() ? std::min<std::size_t>(workers_.workers(), granules) : 1;
  Applied all;
  if (parts == 1) {
    all = update_all(batch);
  } else {
    applied_.assign(parts, {});
    workers_.run(parts, [&](std::size_t part) {
      applied_[part] = update_range(batch, granules * part / parts * granule, granules * (part + 1) / parts * granule);
    });
    for (const Applied& part : applied_) {
      all.count += part.count;
      all.infinite += part.infinite;
      all.largest = std::max(all.largest, part.largest);
      all.grown.add(part.grown);
    }
  }
  tree_->finish(batch.count, all.grown);
  if (shareable) updates_.end(batch.count);
  if (batch.generations == nullptr) {
    all.largest = found.largest;
    all.infinite = found.infinite;
  }
  max_priority_ = std::max(max_priority_, all.largest);
  counters_.saturated += all.infinite;
  counters_.stale += batch.count - all.count;
  counters_.updates += all.count;
  recover_scale();
  return all.count;
}

std::size_t SumTreeReplay::update(const std::int64_t* indices, const float* priorities,
                                  const std::uint32_t* generations, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (!prioritized_) {
    counters_.updates += count;
    return count;
  }
  if (count == 0) return 0;
  const bool written = all_written(indices, count);
  if (!written) check_indices(indices, count, capacity_);
  PriorityScan found = check_priorities(priorities, count);
  priorities = raise(priorities, count, found);
  const bool fits = !(found.largest > 0.0f) || excess_bits(found.largest, alpha_q28_, scale_) == 0;
  if (plain() && fits && written) return update_written({indices, priorities, generations, count}, found);
  bool stale = false;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t generation = slots_[static_cast<std::size_t>(indices[i])].generation;
    if (generation == 0)
      throw ReplayError("Index " + std::to_string(indices[i]) + " at position " + std::to_string(i) +
                        " was never inserted: only written slots can be updated.");
    stale |= generations != nullptr && generations[i] != generation;
  }
  if (stale) {
    kept_indices_.clear();
    kept_priorities_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      if (slots_[static_cast<std::size_t>(indices[i])].generation != generations[i]) continue;
      kept_indices_.push_back(indices[i]);
      kept_priorities_.push_back(priorities[i]);
    }
    counters_.stale += count - kept_indices_.size();
    indices = kept_indices_.data();
    priorities = kept_priorities_.data();
    count = kept_indices_.size();
    found = replay_kernels().scan(priorities, count);
  }
  admit(found);
  values_.resize(count);
  replay_kernels().quantise(priorities, count, alpha_q28_, scale_, values_.data());
  store(indices, priorities, count);
  counters_.updates += count;
  recover_scale();
  return count;
}

void SumTreeReplay::retrieve(const std::int64_t* indices, float* priorities, std::size_t count) const {
  const std::lock_guard lock(mutex_);
  require_open();
  check_indices(indices, count, capacity_);
  for (std::size_t i = 0; i < count; ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(indices[i])];
    priorities[i] = prioritized_ ? slot.priority : (slot.generation != 0 ? 1.0f : 0.0f);
  }
}

void SumTreeReplay::set_alpha(double alpha) {
  check_exponent("alpha", alpha);
  const std::lock_guard lock(mutex_);
  require_open();
  alpha_ = alpha;
  alpha_q28_ = exponent_q28(alpha);
  if (!prioritized_) return;
  set_scale(highest_scale());
  if (scale_ < kDefaultScale) ++counters_.rescales;
}

void SumTreeReplay::find(const std::uint64_t* targets, std::int64_t* indices, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (!prioritized_) throw ReplayError("Only modes that keep priorities can be searched.");
  for (std::size_t i = 0; i < count; ++i)
    if (targets[i] >= tree_->total())
      throw ReplayError("Target at position " + std::to_string(i) + " must lie below the total, " +
                        std::to_string(tree_->total()) + "; found " + std::to_string(targets[i]) + ".");
  values_.resize(count);
  targets_.assign(targets, targets + count);
  tree_->find(targets_.data(), count, 0, indices, values_.data());
}

ReplayState SumTreeReplay::state_locked() const {
  ReplayState state;
  state.alpha = alpha_;
  state.seed = seed_;
  state.call = call_;
  state.scale = scale_;
  state.max_priority = max_priority_;
  state.counters = counters_;
  state.looked_at = looked_at_;
  state.filled = filled_;
  state.total = prioritized_ ? tree_->total() : filled_;
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
  if (prioritized_) {
    const std::uint32_t* leaves = tree_->leaves();
    for (std::size_t i = 0; i < end_; ++i) ++statistics.histogram[static_cast<std::size_t>(std::bit_width(leaves[i]))];
    statistics.histogram[0] = filled_ - tree_->positive();  // the loop counted unwritten slots there too
  }
  statistics.samples_per_item = static_cast<double>(times_sum_) / static_cast<double>(std::max<std::size_t>(filled_, 1));
  statistics.age_mean = static_cast<double>(last_.ages) / static_cast<double>(std::max<std::size_t>(last_.count, 1));
  statistics.age_max = last_.age_max;
  if (last_.squares == 0) return statistics;
  const auto sum = static_cast<double>(last_.weights);
  statistics.effective_sample_size = sum * sum / static_cast<double>(last_.squares) * 0x1p-16;
  return statistics;
}

ReplayState SumTreeReplay::save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves,
                                std::uint16_t* times, std::vector<std::int64_t>* order) const {
  const std::lock_guard lock(mutex_);
  require_open();
  if (order != nullptr && by_time_)
    for (std::int64_t slot = newer_[capacity_]; slot != static_cast<std::int64_t>(capacity_);
         slot = newer_[static_cast<std::size_t>(slot)])
      order->push_back(slot);
  for (std::size_t i = 0; i < capacity_; ++i) {
    generations[i] = slots_[i].generation;
    if (priorities != nullptr) priorities[i] = slots_[i].priority;
  }
  if (times != nullptr) std::copy_n(times_.data(), capacity_, times);
  if (leaves != nullptr && prioritized_) std::copy_n(tree_->leaves(), capacity_, leaves);
  return state_locked();
}

void SumTreeReplay::load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
                         const std::uint32_t* leaves, const std::uint16_t* times, const std::int64_t* order,
                         std::size_t order_count) {
  const std::lock_guard lock(mutex_);
  require_open();
  alpha_ = state.alpha;
  alpha_q28_ = exponent_q28(alpha_);
  seed_ = state.seed;
  call_ = state.call;
  scale_ = static_cast<int>(state.scale);
  max_priority_ = state.max_priority;
  counters_ = state.counters;
  looked_at_ = state.looked_at;
  filled_ = 0;
  end_ = 0;
  written_current_ = false;
  exhausted_now_ = 0;
  times_sum_ = 0;
  mean_sum_ = 0;
  mean_count_ = 0;
  last_ = {};
  for (std::size_t i = 0; i < capacity_; ++i) {
    slots_[i] = {prioritized_ ? priorities[i] : 0.0f, generations[i]};
    times_[i] = times != nullptr ? times[i] : 0;
    times_sum_ += times_[i];
    if (maxima_) rank(i);
    if (initial_ == kInitialMean) account(slots_[i].priority, true);
    const bool written = generations[i] != 0;
    const bool spent = written && exhausted(i);
    exhausted_now_ += spent;
    if (tree_ && !prioritized_) tree_->leaves()[i] = written && !spent;
    if (!written) continue;
    ++filled_;
    end_ = i + 1;
  }
  if (prioritized_) std::copy_n(leaves, capacity_, tree_->leaves());
  if (tree_) {
    tree_->watch_large(scale_ < kDefaultScale);
    tree_->rebuild();
  }
  if (by_time_) {
    newer_[capacity_] = older_[capacity_] = static_cast<std::int64_t>(capacity_);
    for (std::size_t i = 0; i < order_count; ++i) link_newest(static_cast<std::size_t>(order[i]));
  }
}

}  // namespace pearl
