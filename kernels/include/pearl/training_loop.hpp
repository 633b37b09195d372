// Setting 2 on the CPU: Replay Manager and Learner in one thread that loops sample -> gather -> train -> update without
// the host, which grants iterations, inserts between samplings, and reads what was done.
//
// With `prefetch` another thread draws the next batch of a grant (update, sample, gather, in the same strict order) as
// soon as the priorities of this one are known: while the Learner goes backward. Samples and weights keep their bits.
// If that thread has not begun by the end of the step, the loop's does it. Nothing is pending between grants.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/column_store.hpp"
#include "pearl/futex.hpp"
#include "pearl/learner/algorithm.hpp"
#include "pearl/slot_queue.hpp"
#include "pearl/snapshot.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/worker_pool.hpp"

namespace pearl {

// Shuts samplings out while the host inserts. The loop lets a waiting host go first: it asks far more often.
class InsertionWindow {
 public:
  // Called from the host only. Without effect on an open window: a thread that locks its mutex twice waits for itself.
  void open() {
    if (open_) return;
    wanted_.store(true, std::memory_order_seq_cst);
    mutex_.lock();
    open_ = true;
  }
  // Without effect on a closed window: whoever was interrupted may not know.
  void close() {
    if (!open_) return;
    open_ = false;
    wanted_.store(false, std::memory_order_seq_cst);
    mutex_.unlock();
    closed_.ring();
  }
  // Called from the loop only.
  void enter_sampling();
  void leave_sampling() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  bool open_ = false;  // the host's own
  std::atomic<bool> wanted_{false};
  Signal closed_{};
};

// A piece of the policy, for the Actors.
struct Weights {
  const float* data;
  std::size_t count;
};

class TrainingLoop {
 public:
  // Columns of `storage` in the order of learner::Batch. A grant is a slot of `grants` with iterations (int64) and, 64
  // bytes on, beta (double); it is answered by a slot of `done` with iterations and the mean |TD error| of them. Every
  // `interval` steps the policy goes to `snapshot`.
  struct Queues {
    SlotQueue* grants;
    const char* grants_memory;
    SlotQueue* done;
    char* done_memory;
    Snapshot* snapshot;
  };
  // Throws LearnerError unless the slots of both queues take a grant and an answer.
  static void check(const Queues& queues);
  TrainingLoop(SumTreeReplay& replay, const ColumnStore& storage, learner::Algorithm& algorithm, std::size_t batch_size,
               const Queues& queues, std::vector<Weights> policy, std::size_t interval, bool prefetch = false);

  // Called from the loop's thread only. Runs the next grant; false if none has come in time. Throws QueueClosedError
  // once the grants are closed and done with, QueueTimeoutError if the host takes no answer, and what goes wrong in the
  // Replay Manager, the Data Storage and the Learner, on whichever thread.
  bool run_once(double timeout_s);
  // Counts steps anew and publishes the policy, as after construction. While no grant runs.
  void restart();
  // Seconds that the loop's thread spent since construction: sampling, gathering, training, updating, publishing.
  // Waiting for a batch that another thread draws counts as gathering.
  struct Seconds {
    double sample = 0.0, gather = 0.0, train = 0.0, update = 0.0, publish = 0.0;
  };
  // While no grant runs.
  Seconds seconds() const { return seconds_; }
  // The batch that was trained last, or failed, with its slots. While no grant runs.
  const learner::Batch& batch() const { return drawn_[current_].batch; }
  const std::vector<std::int64_t>& indices() const { return drawn_[current_].indices; }
  InsertionWindow& window() { return window_; }

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
  class Stopwatch;
  void draw(Drawn& drawn, double beta, Stopwatch& watch, Seconds& spent);
  void update(const Drawn& drawn);
  void publish();

  SumTreeReplay& replay_;
  const ColumnStore& storage_;
  learner::Algorithm& algorithm_;
  Queues queues_;
  std::vector<Weights> policy_;
  std::size_t interval_;
  std::uint64_t steps_ = 0;
  InsertionWindow window_;
  Seconds seconds_;
  std::vector<Drawn> drawn_;  // one, or with `prefetch` two: one is trained while the other is drawn
  std::size_t current_ = 0;
  std::vector<float> priorities_;
  std::vector<float> staging_;
  const bool prefetch_;
  WorkerPool pool_;  // last: its thread ends before what it works on
};

}  // namespace pearl
