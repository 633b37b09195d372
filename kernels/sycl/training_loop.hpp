// Setting 2 on a SYCL device: sample -> gather -> train -> update, enqueued by one host thread that waits only to give
// the Actors new weights and to answer the host; nothing of a batch leaves the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "column_store.hpp"
#include "learner.hpp"
#include "pearl/slot_queue.hpp"
#include "pearl/snapshot.hpp"
#include "pearl/training_loop.hpp"
#include "sum_tree_replay.hpp"

namespace pearl::device {

class DeviceLoop {
 public:
  // As pearl::TrainingLoop has them. The columns of `storage` are obs, action, reward, next_obs and discount, in this
  // order; `steps` counts the steps of training.
  DeviceLoop(std::shared_ptr<SumTreeReplay> replay, std::shared_ptr<ColumnStore> storage, DeviceLearner& learner,
             std::size_t batch_size, const TrainingLoop::Queues& queues, std::vector<Weights> policy,
             std::size_t interval, std::int64_t* steps);

  // Called from the loop's thread only.
  bool run_once(double timeout_s);
  void restart();
  // Waits after each part of an iteration, so that `seconds` tells them apart; else all of it counts as training.
  void time_parts(bool wanted) { times_parts_ = wanted; }
  TrainingLoop::Seconds seconds() const { return seconds_; }
  InsertionWindow& window() { return window_; }

  // Copies of the batch of the last iteration. While no grant runs.
  std::vector<std::int64_t> last_indices() const;
  std::vector<float> last_weights() const;
  void last_column(std::size_t column, void* rows) const;
  std::size_t batch_size() const { return batch_size_; }
  const ColumnStore& storage() const { return *storage_; }

 private:
  void launch_iteration(double beta, std::int64_t step);
  LearnerMetrics finish();
  void publish();
  void lap(double& seconds);

  std::shared_ptr<SumTreeReplay> replay_;
  std::shared_ptr<ColumnStore> storage_;
  DeviceLearner& learner_;
  std::size_t batch_size_;
  TrainingLoop::Queues queues_;
  std::vector<Weights> policy_;
  std::size_t interval_;
  std::int64_t* steps_;
  std::uint64_t published_ = 0;  // steps since restart()
  InsertionWindow window_;
  bool times_parts_ = false;
  TrainingLoop::Seconds seconds_;
  double last_lap_ = 0.0;
  const BatchMemory* sample_ = nullptr;
  DeviceArray<float> priorities_;
  std::vector<float> staging_;
};

}  // namespace pearl::device
