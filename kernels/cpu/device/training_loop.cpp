#include "pearl/device/training_loop.hpp"

#include <utility>

#include "pearl/errors.hpp"

namespace pearl::device {
namespace {

constexpr std::int64_t kAhead = 64;  // the most iterations enqueued at once

}  // namespace

DeviceLoop::DeviceLoop(std::shared_ptr<SumTreeReplay> replay, std::shared_ptr<ColumnStore> storage,
                       DeviceLearner& learner, std::size_t batch_size, const Queues& queues,
                       std::vector<Weights> policy, std::size_t interval, std::int64_t* steps)
    : GrantedLoop(batch_size, queues, std::move(policy), interval),
      replay_(std::move(replay)),
      storage_(std::move(storage)),
      learner_(learner),
      batch_size_(batch_size),
      steps_(steps) {
  const RowBytes bytes = learner.row_bytes();
  check_rows({bytes.begin(), bytes.end()}, storage_->row_bytes(), replay_->capacity(), storage_->capacity());
  if (replay_->queue().get() != &learner.queue() || storage_->queue().get() != &learner.queue())
    throw LearnerError("Replay Manager, Data Storage and Learner must work on the same queue of one device.");
  const std::size_t rows = (batch_size + tape::kLanes - 1) / tape::kLanes * tape::kLanes;
  priorities_ = {learner.queue(), rows, Placement::device};
  restart();
}

void DeviceLoop::lap(double Seconds::* part) {
  if (times_parts_) learner_.queue().wait();
  watch_.lap(part);
}

void DeviceLoop::launch_iteration(double beta, std::int64_t step) {
  double Seconds::* const sample = times_parts_ ? &Seconds::sample : &Seconds::train;
  double Seconds::* const update = times_parts_ ? &Seconds::update : &Seconds::train;
  window_.enter_sampling();
  try {
    sample_ = &replay_->launch_sample(batch_size_, beta, storage_.get());
  } catch (...) {
    window_.leave_sampling();
    throw;
  }
  window_.leave_sampling();
  lap(sample);
  RowBatch& rows = storage_->device_batch(batch_size_);
  DeviceBatch batch;
  for (std::size_t i = 0; i < 5; ++i) batch.columns[i] = rows.column(i);
  batch.weights = sample_->weights();
  batch.priorities = priorities_.data();
  learner_.set_batch(batch_size_, batch);
  learner_.launch(step);
  lap(&Seconds::train);
  replay_->launch_update(sample_->indices(), priorities_.data(), sample_->generations(), batch_size_);
  lap(update);
}

LearnerMetrics DeviceLoop::finish() {
  LearnerMetrics metrics;
  try {
    metrics = learner_.finish();
  } catch (const LearnerError&) {
    try {
      replay_->check();  // clears the refusal of the diverged priorities
    } catch (const ReplayError&) {
    }
    throw;
  }
  *steps_ += metrics.steps;
  replay_->check();
  return metrics;
}

GrantedLoop::Progress DeviceLoop::run_iterations(std::int64_t iterations, double beta) {
  Progress done;
  std::int64_t enqueued = 0;
  watch_.begin();
  const auto settle = [&] {
    const LearnerMetrics metrics = finish();
    done.td_error += metrics.td_error * static_cast<double>(metrics.steps);
    enqueued = 0;
    lap(&Seconds::train);
  };
  while (wants_more(done.iterations, iterations)) {
    launch_iteration(beta, *steps_ + enqueued);
    ++done.iterations;
    ++enqueued;
    const bool publishes = counts_to_publish();
    if (publishes || enqueued == kAhead) settle();
    if (publishes) {
      publish();
      lap(&Seconds::publish);
    }
  }
  if (enqueued > 0) settle();
  return done;
}

void DeviceLoop::last_draw(std::int64_t* indices, float* weights) const {
  if (sample_ == nullptr) return;
  learner_.queue().copy(sample_->indices(), indices, batch_size_ * sizeof *indices);
  learner_.queue().copy(sample_->weights(), weights, batch_size_ * sizeof *weights);
}

void DeviceLoop::last_column(std::size_t column, void* rows) const {
  const void* from = storage_->device_batch(batch_size_).column(column);
  learner_.queue().copy(from, rows, batch_size_ * storage_->row_bytes()[column]);
}

}  // namespace pearl::device
