// The Replay Manager on the CPU: sum tree, raw priorities, generations, random numbers and counters behind one mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/sum_tree.hpp"

namespace pearl {

struct ReplayCounters {
  std::uint64_t inserts = 0;
  std::uint64_t updates = 0;
  std::uint64_t samples = 0;
  std::uint64_t stale = 0;
  std::uint64_t saturated = 0;
  std::uint64_t rescales = 0;
};

struct ReplayState {
  double alpha = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t call = 0;
  std::int64_t scale = 0;
  float max_priority = 1.0f;
  ReplayCounters counters;
  std::uint64_t filled = 0;
  std::uint64_t total = 0;
};

// Throws ReplayError naming the first index outside [0, capacity).
void check_indices(const std::int64_t* indices, std::size_t count, std::size_t capacity);
// Throws PriorityError naming the first positions that are NaN or negative.
void check_priorities(const float* priorities, std::size_t count);
// Throws ReplayError unless 0 <= exponent <= 4.
void check_exponent(const char* name, double exponent);

// Every method is safe from any thread. Arrays are the caller's; no method keeps a pointer.
class SumTreeReplay {
 public:
  SumTreeReplay(std::int64_t capacity, unsigned fanout, bool prioritized, double alpha, std::uint64_t seed);

  // New items at `indices`; `priorities` may be null: the running maximum. Each occurrence bumps the slot's generation.
  void insert(const std::int64_t* indices, const float* priorities, std::size_t count);
  // Stratified sampling by priority, with importance weights (N P(i))^-beta over the batch's maximum.
  void sample(std::size_t count, double beta, std::int64_t* indices, float* weights, std::uint32_t* generations);
  // Returns how many were applied; with `generations`, stale ones are dropped and counted.
  std::size_t update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                     std::size_t count);
  // Raw priorities, 0 where nothing was written.
  void retrieve(const std::int64_t* indices, float* priorities, std::size_t count) const;
  void set_alpha(double alpha);

  ReplayState state() const;
  // Arrays of `capacity` items; `priorities` and `leaves` may be null (uniform mode has none).
  ReplayState save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves) const;
  // Takes over what save() gave; the caller vouches for it (pearl/replay/arguments.py checks).
  void load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
            const std::uint32_t* leaves);
  void close();

  std::size_t capacity() const { return capacity_; }
  unsigned fanout() const { return fanout_; }
  bool prioritized() const { return prioritized_; }

 private:
  // What update and retrieve touch together lies together.
  struct Slot {
    float priority;
    std::uint32_t generation;  // 0: never written
  };

  void require_open() const;
  ReplayState state_locked() const;
  void bump(std::size_t slot);
  void fit_scale(float largest);
  // Takes in the batch's priorities: saturation, running maximum, scale.
  void admit(const float* priorities, std::size_t count);
  void sample_filled(std::size_t count, std::int64_t* indices);
  std::int64_t written(std::size_t rank);

  const std::size_t capacity_;
  const unsigned fanout_;
  const bool prioritized_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  double alpha_;
  std::int64_t alpha_q28_;
  std::uint64_t seed_;
  std::uint64_t call_ = 0;
  int scale_;
  float max_priority_ = 1.0f;
  ReplayCounters counters_;
  std::size_t filled_ = 0;
  std::size_t end_ = 0;  // one past the highest written slot
  std::vector<std::int64_t> written_;
  bool written_current_ = false;
  AlignedArray<Slot> slots_;
  std::unique_ptr<SumTree> tree_;  // null in uniform mode
  std::vector<std::uint64_t> targets_;
  std::vector<std::uint32_t> values_;
  std::vector<std::int64_t> kept_indices_;
  std::vector<float> kept_priorities_;
};

}  // namespace pearl
