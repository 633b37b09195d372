#include "pearl/sum_tree_replay.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"

namespace pearl {

void check_indices(const std::int64_t* indices, std::size_t count, std::size_t capacity) {
  bool inside = true;
  for (std::size_t i = 0; i < count; ++i) inside &= static_cast<std::uint64_t>(indices[i]) < capacity;
  if (inside) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (static_cast<std::uint64_t>(indices[i]) < capacity) continue;
    throw ReplayError("Index at position " + std::to_string(i) + " must lie in [0, " + std::to_string(capacity) +
                      "); found " + std::to_string(indices[i]) + ".");
  }
}

void check_priorities(const float* priorities, std::size_t count) {
  bool valid = true;
  for (std::size_t i = 0; i < count; ++i) valid &= priorities[i] >= 0.0f;
  if (valid) return;
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
    : capacity_(checked_capacity(capacity)),
      fanout_(fanout),
      prioritized_(prioritized),
      alpha_(checked_alpha(alpha)),
      alpha_q28_(exponent_q28(alpha)),
      seed_(seed),
      scale_(kDefaultScale),
      slots_(capacity_) {
  if (prioritized_) tree_ = make_sum_tree(capacity_, fanout_);
}

void SumTreeReplay::require_open() const {
  if (closed_) throw ReplayError("The Replay Manager is closed.");
}

void SumTreeReplay::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  tree_.reset();
  slots_ = {};
  written_ = {};
}

void SumTreeReplay::bump(std::size_t slot) {
  std::uint32_t& generation = slots_[slot].generation;
  if (generation == 0) {
    ++filled_;
    end_ = std::max(end_, slot + 1);
    written_current_ = false;
  }
  if (++generation == 0) generation = 1;
}

void SumTreeReplay::fit_scale(float largest) {
  if (!(largest > 0.0f)) return;
  const int excess = excess_bits(largest, alpha_q28_, scale_);
  if (excess == 0) return;
  std::uint32_t* leaves = tree_->leaves();
  for (std::size_t i = 0; i < capacity_; ++i) leaves[i] = rescaled(leaves[i], excess);
  tree_->rebuild();
  scale_ -= excess;
  ++counters_.rescales;
}

void SumTreeReplay::admit(const float* priorities, std::size_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float largest = 0.0f;
  std::size_t infinite = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool finite = priorities[i] < kInfinity;
    infinite += !finite;
    largest = std::max(largest, finite ? priorities[i] : 0.0f);
  }
  counters_.saturated += infinite;
  max_priority_ = std::max(max_priority_, largest);
  fit_scale(largest);
}

void SumTreeReplay::insert(const std::int64_t* indices, const float* priorities, std::size_t count) {
  const std::lock_guard lock(mutex_);
  require_open();
  check_indices(indices, count, capacity_);
  if (priorities != nullptr) check_priorities(priorities, count);
  counters_.inserts += count;
  if (!prioritized_) {
    for (std::size_t i = 0; i < count; ++i) bump(static_cast<std::size_t>(indices[i]));
    return;
  }
  if (count == 0) return;
  values_.resize(count);
  if (priorities != nullptr) {
    admit(priorities, count);
    for (std::size_t i = 0; i < count; ++i) values_[i] = quantise(priorities[i], alpha_q28_, scale_);
  } else {
    fit_scale(max_priority_);
    std::fill(values_.begin(), values_.end(), quantise(max_priority_, alpha_q28_, scale_));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto slot = static_cast<std::size_t>(indices[i]);
    bump(slot);
    slots_[slot].priority = priorities != nullptr ? priorities[i] : max_priority_;
  }
  tree_->assign(indices, values_.data(), count);
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

void SumTreeReplay::sample_filled(std::size_t count, std::int64_t* indices) {
  for_each_stratified(seed_, call_, count, [&](std::uint64_t lane, std::uint64_t x) {
    indices[lane] = written(mulhi64(filled_, x));
  });
}

void SumTreeReplay::sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
                           std::uint32_t* generations) {
  check_exponent("beta", beta);
  const std::lock_guard lock(mutex_);
  require_open();
  if (count < 1) throw ReplayError("batch_size must be at least 1; found 0.");
  if (filled_ == 0) throw ReplayError("The replay is empty: insert before sampling.");
  const std::uint64_t total = prioritized_ ? tree_->total() : 0;
  if (total == 0) {
    sample_filled(count, indices);
    std::fill(weights, weights + count, 1.0f);
    for (std::size_t i = 0; i < count; ++i) generations[i] = slots_[static_cast<std::size_t>(indices[i])].generation;
  } else {
    targets_.resize(count);
    values_.resize(count);
    for_each_stratified(seed_, call_, count,
                        [&](std::uint64_t lane, std::uint64_t x) { targets_[lane] = mulhi64(total, x); });
    tree_->find(targets_.data(), count, indices, values_.data());
    for (std::size_t i = 0; i < count; ++i) __builtin_prefetch(&slots_[static_cast<std::size_t>(indices[i])], 0, 3);
    const std::int64_t log2_min = log2_q32(*std::min_element(values_.begin(), values_.end()));
    const std::int64_t beta_q28 = exponent_q28(beta);
    for (std::size_t i = 0; i < count; ++i) weights[i] = importance_weight(log2_min, log2_q32(values_[i]), beta_q28);
    for (std::size_t i = 0; i < count; ++i) generations[i] = slots_[static_cast<std::size_t>(indices[i])].generation;
  }
  ++call_;
  counters_.samples += count;
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
  check_priorities(priorities, count);
  for (std::size_t i = 0; i < count; ++i) __builtin_prefetch(&slots_[static_cast<std::size_t>(indices[i])], 1, 3);
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
  }
  admit(priorities, count);
  values_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    slots_[static_cast<std::size_t>(indices[i])].priority = priorities[i];
    values_[i] = quantise(priorities[i], alpha_q28_, scale_);
  }
  tree_->assign(indices, values_.data(), count);
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
  for (std::size_t i = 0; i < end_; ++i) leaves[i] = quantise(slots_[i].priority, alpha_q28_, scale_);
  tree_->rebuild();
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

ReplayState SumTreeReplay::save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves) const {
  const std::lock_guard lock(mutex_);
  require_open();
  for (std::size_t i = 0; i < capacity_; ++i) {
    generations[i] = slots_[i].generation;
    if (priorities != nullptr) priorities[i] = slots_[i].priority;
  }
  if (leaves != nullptr && prioritized_) std::copy_n(tree_->leaves(), capacity_, leaves);
  return state_locked();
}

void SumTreeReplay::load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
                         const std::uint32_t* leaves) {
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
  for (std::size_t i = 0; i < capacity_; ++i) {
    slots_[i] = {prioritized_ ? priorities[i] : 0.0f, generations[i]};
    if (generations[i] == 0) continue;
    ++filled_;
    end_ = i + 1;
  }
  if (prioritized_) {
    std::copy_n(leaves, capacity_, tree_->leaves());
    tree_->rebuild();
  }
}

}  // namespace pearl
