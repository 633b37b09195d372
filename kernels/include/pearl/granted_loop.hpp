// The common part of setting 2's training loops: iterations that the host grants, answers to it, publishing the policy
// to the Actors, and the window in which the host inserts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pearl/event_ring.hpp"
#include "pearl/futex.hpp"
#include "pearl/slot_queue.hpp"
#include "pearl/snapshot.hpp"

namespace pearl {

// Blocks sampling while the host inserts. The loop lets a waiting host go first, since the loop asks far more often.
class InsertionWindow {
 public:
  // Called from the host only. Does nothing if open: locking the mutex twice would deadlock.
  void open() {
    if (open_) return;
    wanted_.store(true, std::memory_order_seq_cst);
    mutex_.lock();
    open_ = true;
  }
  // Does nothing if closed: an interrupted caller may not know.
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

// One array of the policy, for the Actors.
struct Weights {
  const float* data;
  std::size_t count;
};

class GrantedLoop {
 public:
  // A grant is a slot of `grants` with iterations (int64) and, 64 bytes later, beta (double). The answer is a slot of
  // `done` with iterations and their mean |TD error|. Every `interval` steps the policy is written to `snapshot`.
  struct Queues {
    SlotQueue* grants;
    const char* grants_memory;
    SlotQueue* done;
    char* done_memory;
    Snapshot* snapshot;
  };

  // Called from the loop's thread only. Runs the next grant; false if none came in time. Throws QueueClosedError once the
  // grants are closed and all have run, QueueTimeoutError if the host does not take an answer, and any error of the Replay
  // Manager, the Data Storage and the Learner, from any thread.
  bool run_once(double timeout_s);
  // Resets the count of steps to 0 and publishes the policy, as after construction. Only while no grant runs.
  void restart();
  // Seconds that the loop's thread spent since construction: sampling, gathering, training, updating, publishing.
  struct Seconds {
    double sample = 0.0, gather = 0.0, train = 0.0, update = 0.0, publish = 0.0;
  };
  // Only while no grant runs.
  Seconds seconds() const { return seconds_; }
  // Keeps the newest `most` events of each thread, named as the parts; at first none. Only while no grant runs.
  void keep_events(std::size_t most) {
    events_.keep(most);
    events_ahead_.keep(most);
  }
  // Of the loop's thread, and of the thread that draws batches ahead, if there is one. Only while no grant runs.
  const EventRing& events() const { return events_; }
  const EventRing& events_ahead() const { return events_ahead_; }
  InsertionWindow& window() { return window_; }

 protected:
  // Adds the seconds since the last lap to a part, and records them as an event.
  class Stopwatch {
   public:
    Stopwatch(Seconds& spent, EventRing& events) : spent_(spent), events_(events) {}
    void begin() { last_ = EventRing::Clock::now(); }
    void lap(double Seconds::* part) {
      const auto now = EventRing::Clock::now();
      spent_.*part += std::chrono::duration<double>(now - last_).count();
      events_.record(name_of(part), last_, now);
      last_ = now;
    }

   private:
    static const char* name_of(double Seconds::* part) {
      if (part == &Seconds::sample) return "sample";
      if (part == &Seconds::gather) return "gather";
      if (part == &Seconds::train) return "train";
      return part == &Seconds::update ? "update" : "publish";
    }

    Seconds& spent_;
    EventRing& events_;
    EventRing::Clock::time_point last_ = EventRing::Clock::now();
  };
  struct Progress {
    std::int64_t iterations = 0;
    double td_error = 0.0;  // sum of the iterations' means
  };

  // Throws LearnerError unless a grant and an answer fit the slots and the policy fits the snapshot. The derived class
  // calls restart() when it is complete.
  GrantedLoop(std::size_t batch_size, const Queues& queues, std::vector<Weights> policy, std::size_t interval);
  ~GrantedLoop() = default;
  // Throws LearnerError unless the Data Storage has rows as the Learner expects, and as many as the Replay Manager has
  // slots. Columns are obs, action, reward, next_obs and discount, in this order.
  static void check_rows(const std::vector<std::size_t>& taken_bytes, const std::vector<std::size_t>& stored_bytes,
                         std::size_t replay_capacity, std::size_t storage_capacity);
  // Runs a grant's iterations, or fewer if the grants are closed meanwhile.
  virtual Progress run_iterations(std::int64_t iterations, double beta) = 0;
  bool wants_more(std::int64_t done, std::int64_t iterations) const {
    return done < iterations && !queues_.grants->closed();
  }
  // Steps until the policy must be published.
  std::uint64_t until_publishing() const { return interval_ - steps_ % interval_; }
  // Counts steps; true if the policy must be published after them.
  bool counts_to_publish(std::uint64_t steps = 1) { return (steps_ += steps) % interval_ == 0; }
  void publish() { publish(policy_in_one()); }
  void publish(const float* policy);
  const std::vector<Weights>& policy() const { return policy_; }
  std::size_t policy_size() const { return staging_.size(); }
  // The arrays of the policy one after another, in the host's memory, until the next call.
  virtual const float* policy_in_one();

  InsertionWindow window_;
  Seconds seconds_;
  EventRing events_;
  EventRing events_ahead_;  // of a thread that draws batches ahead

 private:
  Queues queues_;
  std::vector<Weights> policy_;
  std::size_t interval_;
  std::uint64_t steps_ = 0;  // since restart()
  std::vector<float> staging_;
};

}  // namespace pearl
