// The Replay Manager on the CPU: sum tree, raw priorities, generations, random numbers and counters behind one mutex.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pearl/replay_operations.hpp"
#include "pearl/aligned.hpp"
#include "pearl/max_tree.hpp"
#include "pearl/replay_kernels.hpp"
#include "pearl/sum_tree.hpp"
#include "pearl/worker_pool.hpp"

namespace pearl {

enum class Selection { kPrioritized, kUniform, kFifo, kLifo, kTopK };

inline constexpr float kInitialMax = 0.0f;    // the running maximum
inline constexpr float kInitialMean = -1.0f;  // the mean of the positive finite priorities held
inline constexpr float kEpsilonMin = 1e-30f;  // far above subnormal floats, which some devices flush to zero
inline constexpr std::uint32_t kTimesMax = (1u << 16) - 1;  // where counting samples of one item stops

struct ReplayOptions {
  Selection selection = Selection::kPrioritized;
  bool stratified = true;
  bool replacement = true;
  std::uint32_t max_times_sampled = 0;   // 0: no limit; at most kTimesMax
  float initial_priority = kInitialMax;  // of items inserted without one: a constant above, or a number above 0
  float priority_epsilon = 0.0f;         // added to every given priority: 0, or in [kEpsilonMin, 1]
  unsigned workers = 1;                  // threads that share large batches, including the caller's
};

struct ReplayCounters {
  std::uint64_t inserts = 0;
  std::uint64_t updates = 0;
  std::uint64_t samples = 0;
  std::uint64_t stale = 0;
  std::uint64_t saturated = 0;
  std::uint64_t rescales = 0;
  std::uint64_t recoveries = 0;
  std::uint64_t exhausted = 0;
};

struct ReplayState {
  double alpha = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t call = 0;
  std::int64_t scale = 0;
  float max_priority = 1.0f;
  ReplayCounters counters;
  std::uint64_t looked_at = 0;  // inserts and updates at the last search for a higher scale
  std::uint64_t filled = 0;
  std::uint64_t total = 0;
};

// The numbers on which the weights of one bank's part of a larger batch depend, in addition to its items: the sum of
// all priorities to the power of alpha, and the smallest of these in the batch, whose weight is 1. Without priorities:
// the count of filled slots, and 1. Both are 0 if all priorities are.
struct SampledMass {
  double mass = 0.0;
  double least = 0.0;
};

struct ReplayStatistics {
  ReplayState state;
  std::array<std::uint64_t, 29> histogram{};  // items held, by bits of their leaf; counted on demand
  double samples_per_item = 0.0;              // over the items held
  double age_mean = 0.0;                      // of the last batch, in items inserted since
  std::uint32_t age_max = 0;
  double effective_sample_size = 0.0;  // of the last batch's weights
};

// Throws ReplayError naming the first index outside [0, capacity).
void check_indices(const std::int64_t* indices, std::size_t count, std::size_t capacity);
// Scans a batch of priorities; throws PriorityError naming the first positions that are NaN or negative.
PriorityScan check_priorities(const float* priorities, std::size_t count);
// Returns the exponent; throws ReplayError unless it lies in [0, 4].
double check_exponent(const char* name, double exponent);
// Returns epsilon; throws ReplayError unless it is 0 or lies in [kEpsilonMin, 1].
float checked_epsilon(float epsilon);

class SumTreeReplay final : public ReplayOperations {
 public:
  SumTreeReplay(std::int64_t capacity, unsigned fanout, double alpha, std::uint64_t seed,
                const ReplayOptions& options = {});

  void insert(const std::int64_t* indices, const float* priorities, std::size_t count) override;
  // Draws by priority get importance weights (N P(i))^-beta, divided by the batch's maximum; other selections get 1.
  // Weights and generations may be null: not computed. Without generations, ages and samples per item are counted only
  // if `max_times_sampled` needs them.
  void sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
              std::uint32_t* generations) override;
  std::size_t update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                     std::size_t count) override;
  // Raw priorities, 0 where nothing was written.
  void retrieve(const std::int64_t* indices, float* priorities, std::size_t count) const;
  void set_alpha(double alpha);
  // Of the last batch with weights.
  SampledMass sampled_mass() const { return sampled_mass_; }
  // The slots at targets below the total: the search alone, for a caller with its own random numbers.
  void find(const std::uint64_t* targets, std::int64_t* indices, std::size_t count);

  ReplayState state() const;
  ReplayStatistics statistics() const;
  // Arrays of `capacity` items; all but `generations` may be null. In FIFO and LIFO mode, `order` gets the slots that may
  // be sampled, oldest first.
  ReplayState save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves,
                   std::uint16_t* times = nullptr, std::vector<std::int64_t>* order = nullptr) const;
  // Restores what save() gave. Unchecked: pearl/replay/arguments.py checks it.
  void load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
            const std::uint32_t* leaves, const std::uint16_t* times = nullptr, const std::int64_t* order = nullptr,
            std::size_t order_count = 0);
  void close();

  std::size_t capacity() const override { return capacity_; }
  unsigned fanout() const { return fanout_; }
  // Whether priorities are kept.
  bool prioritized() const override { return prioritized_; }

 private:
  // Fields that sample and update touch together.
  struct Slot {
    float priority;
    std::uint32_t generation;  // the count of inserts including this one, modulo 2^32, never 0; 0: never written
  };
  static constexpr std::size_t kChunk = 2048;  // items; a smaller chunk takes less time than waking a thread
  struct LastBatch {
    std::size_t count = 0;      // of items whose ages are known
    std::uint64_t counted = 0;  // samples added to times_
    std::uint64_t ages = 0;
    std::uint32_t age_max = 0;
    std::uint64_t weights = 0;  // sum of weights, in 2^-24
    std::uint64_t squares = 0;  // sum of squared weights, in 2^-32
    void add(const LastBatch& other) {
      count += other.count;
      counted += other.counted;
      ages += other.ages;
      age_max = other.age_max > age_max ? other.age_max : age_max;
      weights += other.weights;
      squares += other.squares;
    }
  };

  void require_open() const;
  ReplayState state_locked() const;
  bool exhausted(std::size_t slot) const { return limit_ != 0 && times_[slot] >= limit_; }
  std::size_t sampleable() const { return filled_ - exhausted_now_; }
  void bump(std::size_t slot);
  // Removes an item that was sampled max_times_sampled times from everything it could be selected from.
  void retire(std::size_t slot);
  void rank(std::size_t slot);
  // Whether all indices are of written slots.
  bool all_written(const std::int64_t* indices, std::size_t count) const;
  // Whether a batch may be written to slots without reading what they held.
  bool plain() const { return tree_ && prioritized_ && !maxima_ && limit_ == 0 && initial_ != kInitialMean; }
  struct Applied {
    std::size_t count = 0;
    std::size_t infinite = 0;
    float largest = 0.0f;
    SumTree::Growth grown;
  };
  struct Part {  // of a batch of updates
    const std::int64_t* slots = nullptr;
    const float* priorities = nullptr;
    const std::uint32_t* generations = nullptr;  // null: none is stale
    std::size_t count = 0;
  };
  void update_part(const Part& part, const Part& ahead, std::size_t batch, Applied& done);
  Applied update_all(const Part& batch);
  Applied update_range(const Part& batch, std::size_t first, std::size_t end);
  std::size_t update_written(const Part& batch, const PriorityScan& found);
  bool insert_range(const std::int64_t* indices, const float* priorities, std::size_t count);
  // Writes the batch's priorities, and values_ as their leaves, to slots and trees.
  void store(const std::int64_t* indices, const float* priorities, std::size_t count);
  void account(float priority, bool added);
  float initial_priority() const;
  void random(std::size_t count, bool stratified);
  void select(std::size_t count, std::int64_t* indices);
  void take_in_order(std::size_t count, std::int64_t* indices);
  void draw_in_turn(SumTree& tree, std::size_t count, std::int64_t* indices);
  void draw_limited(SumTree& tree, std::size_t count, std::int64_t* indices);
  [[noreturn]] void throw_used_up(std::size_t count, std::size_t draws) const;
  struct Drawn {
    std::uint32_t smallest = ~0u;
    LastBatch batch;
  };
  static constexpr std::size_t kTalliedAhead = 32;  // prefetch distance
  void prefetch_tally(std::int64_t slot) const;
  void tally(const std::int64_t* indices, std::uint32_t* generations, std::size_t count, LastBatch& batch);
  // Draws by priority: slots, weights, generations and statistics of a batch.
  void draw(std::size_t count, double beta, std::int64_t* indices, float* weights, std::uint32_t* generations);
  static void add_weights(const float* weights, std::size_t count, LastBatch& batch);
  bool may_share(std::size_t count) const;
  void link_newest(std::size_t slot);
  void unlink(std::size_t slot);
  // Adds epsilon, if set, to a batch's priorities and updates `found` accordingly.
  const float* raise(const float* priorities, std::size_t count, PriorityScan& found);
  void fit_scale(float largest);
  void recover_scale();
  int highest_scale() const;
  // Changes the scale and quantises every priority for it.
  void set_scale(int scale);
  // Updates saturation, running maximum and scale for the batch's priorities.
  void admit(const PriorityScan& found);
  std::int64_t written(std::size_t rank);

  const std::size_t capacity_;
  const unsigned fanout_;
  const Selection selection_;
  const bool prioritized_;
  const bool by_time_;
  const bool stratified_;
  const bool replacement_;
  const std::uint32_t limit_;
  const bool limited_;  // a batch may use an item up: without replacement, or with max_times_sampled
  const float initial_;
  const float epsilon_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  double alpha_;
  std::int64_t alpha_q28_;
  std::uint64_t seed_;
  std::uint64_t call_ = 0;
  int scale_;
  float max_priority_ = 1.0f;
  ReplayCounters counters_;
  std::uint64_t looked_at_ = 0;
  std::size_t filled_ = 0;
  std::size_t end_ = 0;  // one past the highest written slot
  std::vector<std::int64_t> written_;
  bool written_current_ = false;
  std::size_t exhausted_now_ = 0;
  std::uint64_t times_sum_ = 0;
  unsigned __int128 mean_sum_ = 0;  // of priorities, in 2^-40; this and the count only for kInitialMean
  std::size_t mean_count_ = 0;
  LastBatch last_;
  SampledMass sampled_mass_;
  std::uint32_t smallest_ = 0;  // leaf of the last batch that was drawn by priority, with weights
  WorkerPool workers_;
  SharingTrial draws_;
  SharingTrial updates_;
  AlignedArray<Slot> slots_;
  AlignedArray<std::uint16_t> times_;  // sampled since written
  std::unique_ptr<SumTree> tree_;     // of leaves; in uniform mode of ones if limited_; else null
  std::unique_ptr<MaxTree> maxima_;   // mode kTopK
  AlignedArray<std::int64_t> newer_;  // FIFO and LIFO: a ring of slots, oldest first, whose end is place `capacity_`
  AlignedArray<std::int64_t> older_;
  std::vector<std::uint64_t> targets_;
  std::vector<std::uint32_t> values_;
  std::vector<Drawn> drawn_;      // by chunk
  std::vector<Applied> applied_;  // by chunk
  std::vector<std::int64_t> kept_indices_;
  std::vector<float> kept_priorities_;
  std::vector<float> raised_;
};

}  // namespace pearl
