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

void check_exponent(const char* name, double exponent) {
  if (exponent >= 0.0 && exponent <= kExponentMax) return;
  std::ostringstream message;
  message << name << " must lie in [0, 4]; found " << exponent << ".";
  throw ReplayError(message.str());
}

namespace {

std::size_t checked_capacity(std::int64_t capacity) {
  // 2^36 leaves of 28 bits are the most whose sum fits 64 bits.
  if (capacity >= 1 && capacity <= std::int64_t{1} << 36) return static_cast<std::size_t>(capacity);
  throw ReplayError("Replay capacity must lie in [1, 2**36]; found " + std::to_string(capacity) + ".");
}

double checked_alpha(double alpha) {
  check_exponent("alpha", alpha);
  return alpha;
}

}  // namespace

SumTreeReplay::SumTreeReplay(std::int64_t capacity, unsigned fanout, bool prioritized, double alpha,
                             std::uint64_t seed)
    : SumTreeReplay(capacity, fanout, alpha, seed,
                    ReplayOptions{.selection = prioritized ? Selection::kPrioritized : Selection::kUniform}) {}

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
      in_turn_((selection_ == Selection::kPrioritized || selection_ == Selection::kUniform) &&
               (!replacement_ || limit_ != 0)),
      initial_(options.initial_priority),
      alpha_(checked_alpha(alpha)),
      alpha_q28_(exponent_q28(alpha)),
      seed_(seed),
      scale_(kDefaultScale),
      slots_(capacity_),
      times_(capacity_) {
  if (prioritized_ || in_turn_) tree_ = make_sum_tree(capacity_, fanout_);
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

// A slot's place among the largest: by its exact priority, whose bits sort as it does.
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

// Whole units of 2^-40, so that the mean does not depend on the order of what came and went.
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

void SumTreeReplay::fit_scale(float largest) {
  if (!(largest > 0.0f)) return;
  const int excess = excess_bits(largest, alpha_q28_, scale_);
  if (excess == 0) return;
  std::uint32_t* leaves = tree_->leaves();
  for (std::size_t i = 0; i < end_; ++i) {
    if (leaves[i] == 0) continue;
    const bool infinite = slots_[i].priority > std::numeric_limits<float>::max();  // these stay the largest
    leaves[i] = infinite ? kLeafMax : rescaled(leaves[i], excess);
  }
  tree_->rebuild();
  scale_ -= excess;
  ++counters_.rescales;
}

void SumTreeReplay::admit(const PriorityScan& found) {
  counters_.saturated += found.infinite;
  max_priority_ = std::max(max_priority_, found.largest);
  fit_scale(found.largest);
}

// A ring inserts into slots that follow one another: then slots and sums are written without a look at each. Returns
// false where the batch is none such.
bool SumTreeReplay::insert_range(const std::int64_t* indices, const float* priorities, std::size_t count) {
  const bool may = plain() || (!prioritized_ && !tree_ && !by_time_);
  if (!may || count < 2 || end_ != filled_) return false;
  const auto first = static_cast<std::size_t>(indices[0]);
  const auto before = static_cast<std::uint32_t>(counters_.inserts);
  if (first > end_ || count >= ~before) return false;  // a gap, or generations that start over
  std::uint64_t apart = 0;
  for (std::size_t i = 0; i < count; ++i) apart |= static_cast<std::uint64_t>(indices[i]) ^ (first + i);
  if (apart != 0) return false;
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
    admit(found);
    replay_kernels().quantise(priorities, count, alpha_q28_, scale_, values_.data());
  } else {
    const float initial = initial_priority();
    fit_scale(initial);
    std::fill(values_.begin(), values_.end(), quantise(initial, alpha_q28_, scale_));
    kept_priorities_.assign(count, initial);
    priorities = kept_priorities_.data();
  }
  if (insert_range(indices, priorities, count)) return;
  for (std::size_t i = 0; i < count; ++i) bump(static_cast<std::size_t>(indices[i]));
  store(indices, priorities, count);
}

std::int64_t SumTreeReplay::written(std::size_t rank) {
  if (end_ == filled_) return static_cast<std::int64_t>(rank);  // no gaps: what a ring gives
  if (!written_current_) {
    written_.clear();
    for (std::size_t slot = 0; slot < end_; ++slot)
      if (slots_[slot].generation != 0) written_.push_back(static_cast<std::int64_t>(slot));
    written_current_ = true;
  }
  return written_[rank];
}

// Fills targets_ with numbers uniform in [0, 2^64): any, or the k-th in the k-th of `count` equal slices.
void SumTreeReplay::random(std::size_t count) {
  targets_.resize(count);
  if (stratified_) {
    for_each_stratified(seed_, call_, count, [&](std::uint64_t lane, std::uint64_t x) { targets_[lane] = x; });
    return;
  }
  for (std::size_t lane = 0; lane < count; lane += 2) {
    const PhiloxWords words = philox_lane_pair(seed_, call_, lane / 2);
    targets_[lane] = words[0] | std::uint64_t{words[1]} << 32;
    if (lane + 1 < count) targets_[lane + 1] = words[2] | std::uint64_t{words[3]} << 32;
  }
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

// Each is drawn from what the ones before have left; afterwards the tree is as it was. values_ gets the leaves.
void SumTreeReplay::draw_in_turn(SumTree& tree, std::size_t count, std::int64_t* indices) {
  random(count);
  values_.resize(count);
  const std::uint32_t none = 0;
  std::size_t drawn = 0;
  for (; drawn < count && tree.total() > 0; ++drawn) {
    std::uint64_t target = mulhi64(tree.total(), targets_[drawn]);
    tree.find(&target, 1, false, indices + drawn, values_.data() + drawn);
    const auto slot = static_cast<std::size_t>(indices[drawn]);
    if (limit_ != 0) ++times_[slot];
    const bool last = exhausted(slot);
    if (last || !replacement_) tree.assign(indices + drawn, &none, 1);
  }
  tree.assign(indices, values_.data(), drawn);
  if (limit_ != 0)
    for (std::size_t i = 0; i < drawn; ++i) --times_[static_cast<std::size_t>(indices[i])];
  if (drawn < count)
    throw ReplayError("A batch of " + std::to_string(count) + " cannot be sampled: " + std::to_string(drawn) +
                      " draws are left before each item that can be drawn was sampled " + std::to_string(limit_) +
                      " times.");
}

// Everything but the draw by priority in one go, which sample() does.
void SumTreeReplay::select(std::size_t count, std::int64_t* indices) {
  const bool any_positive = prioritized_ && tree_->total() > 0;
  const std::size_t available = any_positive ? tree_->positive() : sampleable();
  const bool drawn = selection_ == Selection::kPrioritized || selection_ == Selection::kUniform;
  if ((!drawn || !replacement_) && count > available)
    throw ReplayError("A batch of " + std::to_string(count) + " cannot be sampled without repetition: " +
                      std::to_string(available) + " items can be sampled.");
  if (!drawn) return take_in_order(count, indices);
  if (!in_turn_) {
    random(count);
    for (std::size_t i = 0; i < count; ++i) indices[i] = written(mulhi64(filled_, targets_[i]));
    return;
  }
  if (any_positive || !prioritized_) return draw_in_turn(*tree_, count, indices);
  const std::unique_ptr<SumTree> ones = make_sum_tree(capacity_, fanout_);
  for (std::size_t i = 0; i < end_; ++i) ones->leaves()[i] = slots_[i].generation != 0 && !exhausted(i);
  ones->rebuild();
  draw_in_turn(*ones, count, indices);
}

// Counts a selected batch and reads its generations.
void SumTreeReplay::tally(const std::int64_t* indices, std::uint32_t* generations, std::size_t count) {
  const auto now = static_cast<std::uint32_t>(counters_.inserts);
  std::uint64_t ages = 0;
  std::uint64_t counted = 0;
  std::uint32_t age_max = 0;
  const bool limited = limit_ != 0;
  constexpr std::size_t kAhead = 32;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const auto ahead = static_cast<std::size_t>(indices[i + kAhead]);
      __builtin_prefetch(&slots_[ahead], 0, 3);
      __builtin_prefetch(&times_[ahead], 1, 3);
    }
    const auto slot = static_cast<std::size_t>(indices[i]);
    const std::uint32_t generation = slots_[slot].generation;
    if (generations != nullptr) generations[i] = generation;
    const std::uint32_t age = now - generation;
    ages += age;
    age_max = std::max(age_max, age);
    const std::uint16_t counts = times_[slot] < kTimesMax;
    times_[slot] = static_cast<std::uint16_t>(times_[slot] + counts);
    counted += counts;
    if (limited && times_[slot] == limit_) retire(slot);
  }
  times_sum_ += counted;
  last_.count = count;
  last_.ages = ages;
  last_.age_max = age_max;
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
  std::uint64_t weight_sum = 0;
  std::uint64_t weight_squares = 0;
  const std::uint64_t total = selection_ == Selection::kPrioritized ? tree_->total() : 0;
  if (total == 0) {
    select(count, indices);
    if (weights != nullptr) std::fill(weights, weights + count, 1.0f);
    weight_sum = std::uint64_t{count} << 24;
    weight_squares = std::uint64_t{count} << 32;
  } else {
    if (in_turn_) {
      select(count, indices);
    } else {
      values_.resize(count);
      if (stratified_) {
        targets_.resize(count);
        replay_kernels().targets(seed_, call_, count, 0, count, total, targets_.data());
      } else {
        random(count);
        for (std::size_t i = 0; i < count; ++i) targets_[i] = mulhi64(total, targets_[i]);
      }
      tree_->find(targets_.data(), count, stratified_, indices, values_.data());
    }
    if (weights != nullptr) {
      replay_kernels().weights(values_.data(), count, exponent_q28(beta), weights);
      for (std::size_t i = 0; i < count; ++i) {
        const auto units = static_cast<std::uint64_t>(static_cast<std::int32_t>(weights[i] * 0x1p24f));
        weight_sum += units;
        weight_squares += (units * units) >> 16;
      }
    }
  }
  last_ = {};
  if (generations != nullptr || limit_ != 0) tally(indices, generations, count);
  last_.weights = weight_sum;
  last_.squares = weight_squares;
  ++call_;
  counters_.samples += count;
}

bool SumTreeReplay::all_written(const std::int64_t* indices, std::size_t count) const {
  return end_ == filled_ && replay_kernels().all_below(indices, count, end_);  // no gaps: what a ring gives
}

// The case that training lives on: every slot is written and every priority fits the scale, so that nothing can fail.
// Memory of one part is fetched while the part before is applied.
std::size_t SumTreeReplay::update_in_parts(const std::int64_t* indices, const float* priorities,
                                           const std::uint32_t* generations, std::size_t count) {
  constexpr std::size_t kPart = SumTree::kPart;
  std::int64_t kept[kPart];
  float values[kPart];
  std::uint32_t leaves[kPart];
  std::size_t applied = 0;
  float largest = max_priority_;
  std::size_t infinite = 0;
  const std::size_t first = std::min(count, kPart);
  for (std::size_t i = 0; i < first; ++i) __builtin_prefetch(&slots_[static_cast<std::size_t>(indices[i])], 1, 3);
  tree_->assign_part(nullptr, nullptr, 0, count, indices, first);
  for (std::size_t start = 0; start < count; start += kPart) {
    const std::size_t size = std::min(kPart, count - start);
    const std::size_t end = start + size;
    const std::size_t ahead = std::min(kPart, count - end);
    for (std::size_t i = 0; i < ahead; ++i)
      __builtin_prefetch(&slots_[static_cast<std::size_t>(indices[end + i])], 1, 3);
    const std::int64_t* places = indices + start;
    const float* given = priorities + start;
    std::size_t fresh = size;
    if (generations == nullptr) {
      for (std::size_t i = 0; i < size; ++i) slots_[static_cast<std::size_t>(places[i])].priority = given[i];
    } else {
      fresh = 0;
      for (std::size_t i = 0; i < size; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(places[i])];
        const bool current = slot.generation == generations[start + i];
        slot.priority = current ? given[i] : slot.priority;
        kept[fresh] = places[i];
        values[fresh] = given[i];
        fresh += current;
      }
      if (fresh < size) {
        places = kept;
        given = values;
      }
    }
    const PriorityScan found = replay_kernels().scan(given, fresh);
    largest = std::max(largest, found.largest);
    infinite += found.infinite;
    replay_kernels().quantise(given, fresh, alpha_q28_, scale_, leaves);
    tree_->assign_part(places, leaves, fresh, count, indices + end, ahead);
    applied += fresh;
  }
  tree_->finish(count);
  max_priority_ = largest;
  counters_.saturated += infinite;
  counters_.stale += count - applied;
  counters_.updates += applied;
  return applied;
}

std::size_t SumTreeReplay::update(const std::int64_t* indices, const float* priorities,
                                  const std::uint32_t* generations, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (!prioritized_) {
    counters_.updates += count;
    return count;
  }
  check_indices(indices, count, capacity_);
  PriorityScan found = check_priorities(priorities, count);
  const bool fits = !(found.largest > 0.0f) || excess_bits(found.largest, alpha_q28_, scale_) == 0;
  if (plain() && fits && all_written(indices, count))
    return update_in_parts(indices, priorities, generations, count);
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
  float largest = 0.0f;
  for (std::size_t i = 0; i < end_; ++i)
    if (slots_[i].priority <= std::numeric_limits<float>::max()) largest = std::max(largest, slots_[i].priority);
  const int excess = largest > 0.0f ? excess_bits(largest, alpha_q28_, kDefaultScale) : 0;
  scale_ = kDefaultScale - excess;
  if (excess > 0) ++counters_.rescales;
  std::uint32_t* leaves = tree_->leaves();
  for (std::size_t i = 0; i < end_; ++i)
    leaves[i] = exhausted(i) ? 0 : quantise(slots_[i].priority, alpha_q28_, scale_);
  tree_->rebuild();
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
  tree_->find(targets_.data(), count, false, indices, values_.data());
}

ReplayState SumTreeReplay::state_locked() const {
  ReplayState state;
  state.alpha = alpha_;
  state.seed = seed_;
  state.call = call_;
  state.scale = scale_;
  state.max_priority = max_priority_;
  state.counters = counters_;
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
    statistics.histogram[0] = filled_ - tree_->positive();  // there unwritten slots were counted too
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
  if (tree_) tree_->rebuild();
  if (by_time_) {
    newer_[capacity_] = older_[capacity_] = static_cast<std::int64_t>(capacity_);
    for (std::size_t i = 0; i < order_count; ++i) link_newest(static_cast<std::size_t>(order[i]));
  }
}

}  // namespace pearl
