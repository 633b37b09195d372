// Setting 2 on the CPU: one thread runs Replay Manager and Learner in a loop: sample -> gather -> train -> update. The
// host grants iterations, inserts between samplings, and reads the results.
//
// With `prefetch`, another thread draws the next batch of a grant (update, sample, gather, in the same strict order) as
// soon as this batch's priorities are known, during the Learner's backward pass. Samples and weights keep their bits.
// If that thread has not begun by the end of the step, the loop's thread draws. Nothing is pending between grants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/column_store.hpp"
#include "pearl/granted_loop.hpp"
#include "pearl/learner/algorithm.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/worker_pool.hpp"

namespace pearl {

// Time spent waiting for a batch that another thread draws counts as gathering.
class TrainingLoop final : public GrantedLoop {
 public:
  TrainingLoop(SumTreeReplay& replay, const ColumnStore& storage, learner::Algorithm& algorithm, std::size_t batch_size,
               const Queues& queues, std::vector<Weights> policy, std::size_t interval, bool prefetch = false);

  // The batch trained last, or the one that failed, and its slots. Only while no grant runs.
  const learner::Batch& batch() const { return drawn_[current_].batch; }
  const std::vector<std::int64_t>& indices() const { return drawn_[current_].indices; }

  // From the next batch on, the replay is one bank of several, which the Learners of `others` sample: the weights of a
  // batch become those of all banks together (docs/local_sgd.md, Eq. 2). Only while no grant runs.
  void set_banks(std::vector<SampledMass> others) {
    others_ = std::move(others);
    banked_ = true;
  }
  // The smallest `SampledMass::least` since the last call; infinity without a batch. Only while no grant runs.
  double take_least() { return std::exchange(least_, std::numeric_limits<double>::infinity()); }

 private:
  // A sampled batch and its rows.
  struct Drawn {
    std::vector<std::int64_t> indices;
    std::vector<float> weights;
    std::vector<std::uint32_t> generations;
    std::vector<AlignedArray<char>> columns;
    std::vector<void*> targets;
    learner::Batch batch;
  };
  Progress run_iterations(std::int64_t iterations, double beta) override;
  void draw(Drawn& drawn, double beta, Stopwatch& watch);
  // The factor of the weights of a batch of this bank.
  double bank_factor(const SampledMass& own, double beta) const;
  void update(const Drawn& drawn);

  SumTreeReplay& replay_;
  const ColumnStore& storage_;
  learner::Algorithm& algorithm_;
  std::vector<Drawn> drawn_;  // one; with `prefetch` two: one is trained while the other is drawn
  std::size_t current_ = 0;
  std::vector<float> priorities_;
  const bool prefetch_;
  bool banked_ = false;
  std::vector<SampledMass> others_;
  double least_ = std::numeric_limits<double>::infinity();
  WorkerPool pool_;  // last: its thread must end before the members above are destroyed
};

}  // namespace pearl
