// Setting 2 on the CPU: Replay Manager and Learner in one thread that loops sample -> gather -> train -> update without
// the host, which grants iterations, inserts between samplings, and reads what was done.
//
// With `prefetch` another thread draws the next batch of a grant (update, sample, gather, in the same strict order) as
// soon as the priorities of this one are known: while the Learner goes backward. Samples and weights keep their bits.
// If that thread has not begun by the end of the step, the loop's does it. Nothing is pending between grants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/column_store.hpp"
#include "pearl/granted_loop.hpp"
#include "pearl/learner/algorithm.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/worker_pool.hpp"

namespace pearl {

// Waiting for a batch that another thread draws counts as gathering.
class TrainingLoop final : public GrantedLoop {
 public:
  TrainingLoop(SumTreeReplay& replay, const ColumnStore& storage, learner::Algorithm& algorithm, std::size_t batch_size,
               const Queues& queues, std::vector<Weights> policy, std::size_t interval, bool prefetch = false);

  // The batch that was trained last, or failed, with its slots. While no grant runs.
  const learner::Batch& batch() const { return drawn_[current_].batch; }
  const std::vector<std::int64_t>& indices() const { return drawn_[current_].indices; }

 private:
  // What was sampled, and its rows.
  struct Drawn {
    std::vector<std::int64_t> indices;
    std::vector<float> weights;
    std::vector<std::uint32_t> generations;
    std::vector<AlignedArray<char>> columns;
    std::vector<void*> targets;
    learner::Batch batch;
  };
  Progress run_iterations(std::int64_t iterations, double beta) override;
  void draw(Drawn& drawn, double beta, Stopwatch& watch, Seconds& spent);
  void update(const Drawn& drawn);

  SumTreeReplay& replay_;
  const ColumnStore& storage_;
  learner::Algorithm& algorithm_;
  std::vector<Drawn> drawn_;  // one, or with `prefetch` two: one is trained while the other is drawn
  std::size_t current_ = 0;
  std::vector<float> priorities_;
  const bool prefetch_;
  WorkerPool pool_;  // last: its thread ends before what it works on
};

}  // namespace pearl
