// Setting 2 on a parallel device: sample -> gather -> train -> update. One host thread enqueues many iterations at once,
// where the device has recordings as one launch, and waits only to publish new weights for the Actors and to answer the
// host. Batches never leave the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pearl/device/column_store.hpp"
#include "pearl/device/learner.hpp"
#include "pearl/granted_loop.hpp"
#include "pearl/device/sum_tree_replay.hpp"

namespace pearl::device {

class DeviceLoop final : public GrantedLoop {
 public:
  // `steps` counts the training steps.
  DeviceLoop(std::shared_ptr<SumTreeReplay> replay, std::shared_ptr<ColumnStore> storage, DeviceLearner& learner,
             std::size_t batch_size, const Queues& queues, std::vector<Weights> policy,
             std::size_t interval, std::int64_t* steps);

  // Waits after each part of an iteration, to time the parts separately; otherwise all time counts as training.
  void time_parts(bool wanted) { times_parts_ = wanted; }

  // Copies of the last iteration's batch, to arrays of `drawn()` items and `batch_size()` rows. While no grant runs.
  std::size_t drawn() const { return sample_ == nullptr ? 0 : batch_size_; }
  void last_draw(std::int64_t* indices, float* weights) const;
  void last_column(std::size_t column, void* rows) const;
  std::size_t batch_size() const { return batch_size_; }
  const ColumnStore& storage() const { return *storage_; }

 private:
  // Prepared iterations, as recorded; null while they were only launched.
  struct Recorded {
    std::size_t iterations;
    DeviceLearner::Kind kind;
    std::unique_ptr<const Recording> launches;
  };
  // Memory whose addresses are part of recordings, and which others may allocate again.
  struct Places {
    std::uint64_t build;
    const void *draws, *indices, *generations, *rows;
    bool operator==(const Places&) const = default;
  };

  void prepare(std::size_t count, double beta);
  void launch_iteration(std::size_t place);
  void launch_iterations(std::size_t count);
  LearnerMetrics finish();
  Progress run_iterations(std::int64_t iterations, double beta) override;
  const float* policy_in_one() override;
  void fetch_policy();
  void lap(double Seconds::* part);

  std::shared_ptr<SumTreeReplay> replay_;
  std::shared_ptr<ColumnStore> storage_;
  DeviceLearner& learner_;
  std::size_t batch_size_;
  std::int64_t* steps_;
  bool times_parts_ = false;
  Stopwatch watch_{seconds_, events_};
  const BatchMemory* sample_ = nullptr;
  DeviceArray<float> priorities_;
  DeviceArray<float> policy_;  // pinned
  Places places_{};
  std::vector<Recorded> recorded_;
};

}  // namespace pearl::device
