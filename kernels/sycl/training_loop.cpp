#include "training_loop.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl::device {
namespace {

constexpr std::size_t kField = 64;  // fields of a slot begin at multiples of this
constexpr double kAnswerTimeout = 60.0;
constexpr std::int64_t kAhead = 64;  // iterations that may be under way at once

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

DeviceLoop::DeviceLoop(std::shared_ptr<SumTreeReplay> replay, std::shared_ptr<ColumnStore> storage,
                       DeviceLearner& learner, std::size_t batch_size, const TrainingLoop::Queues& queues,
                       std::vector<Weights> policy, std::size_t interval, std::int64_t* steps)
    : replay_(std::move(replay)),
      storage_(std::move(storage)),
      learner_(learner),
      batch_size_(batch_size),
      queues_(queues),
      policy_(std::move(policy)),
      interval_(interval),
      steps_(steps) {
  if (batch_size < 1 || interval < 1) throw LearnerError("A training loop needs a batch and an interval of at least 1.");
  TrainingLoop::check(queues);
  const std::size_t observation = learner.observation_size() * sizeof(float);
  const std::vector<std::size_t> wanted = {observation, learner.action_bytes(), sizeof(float), observation, sizeof(float)};
  if (storage_->row_bytes().size() != wanted.size())
    throw LearnerError("A training loop needs the five columns of transitions.");
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (storage_->row_bytes()[i] != wanted[i])
      throw LearnerError("The Learner takes " + std::to_string(wanted[i]) + " bytes of column " + std::to_string(i) +
                         " of a transition; the Data Storage has " + std::to_string(storage_->row_bytes()[i]) + ".");
  if (storage_->capacity() != replay_->capacity())
    throw LearnerError("Replay Manager and Data Storage differ in capacity: " + std::to_string(replay_->capacity()) +
                       " and " + std::to_string(storage_->capacity()) + ".");
  if (replay_->queue().get() != &learner.queue() || storage_->queue().get() != &learner.queue())
    throw LearnerError("Replay Manager, Data Storage and Learner must work on the same queue of one device.");
  std::size_t count = 0;
  for (const Weights& piece : policy_) count += piece.count;
  if (count * sizeof(float) != queues.snapshot->payload_bytes())
    throw LearnerError("The policy has " + std::to_string(count) + " weights; the queue to the Actors takes " +
                       std::to_string(queues.snapshot->payload_bytes() / sizeof(float)) + ".");
  staging_.resize(count);
  const std::size_t rows = (batch_size + tape::kLanes - 1) / tape::kLanes * tape::kLanes;
  priorities_ = {learner.queue(), rows, Placement::device};
  restart();
}

void DeviceLoop::publish() {
  float* to = staging_.data();
  for (const Weights& piece : policy_) {
    std::memcpy(to, piece.data, piece.count * sizeof(float));
    to += piece.count;
  }
  queues_.snapshot->write(staging_.data());
}

void DeviceLoop::restart() {
  published_ = 0;
  publish();
}

void DeviceLoop::lap(double& seconds) {
  if (times_parts_) learner_.queue().wait();
  const double now = now_s();
  seconds += now - last_lap_;
  last_lap_ = now;
}

void DeviceLoop::launch_iteration(double beta, std::int64_t step) {
  double& sample = times_parts_ ? seconds_.sample : seconds_.train;
  double& update = times_parts_ ? seconds_.update : seconds_.train;
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
  lap(seconds_.train);
  replay_->launch_update(sample_->indices(), priorities_.data(), sample_->generations(), batch_size_);
  lap(update);
}

LearnerMetrics DeviceLoop::finish() {
  LearnerMetrics metrics;
  try {
    metrics = learner_.finish();
  } catch (const LearnerError&) {
    try {
      replay_->check();  // what it was given had diverged, too
    } catch (const ReplayError&) {
    }
    throw;
  }
  *steps_ += metrics.steps;
  replay_->check();
  return metrics;
}

bool DeviceLoop::run_once(double timeout_s) {
  const std::int64_t slot = queues_.grants->peek(timeout_s);
  if (slot < 0) return false;
  const char* grant = queues_.grants_memory + queues_.grants->offset(static_cast<std::size_t>(slot));
  std::int64_t iterations;
  double beta;
  std::memcpy(&iterations, grant, sizeof iterations);
  std::memcpy(&beta, grant + kField, sizeof beta);
  double td_error = 0.0;
  std::int64_t done = 0, under_way = 0;
  last_lap_ = now_s();
  const auto settle = [&] {
    const LearnerMetrics metrics = finish();
    td_error += metrics.td_error * static_cast<double>(metrics.steps);
    under_way = 0;
    lap(seconds_.train);
  };
  while (done < iterations && !queues_.grants->closed()) {
    launch_iteration(beta, *steps_ + under_way);
    ++done;
    ++under_way;
    const bool publishes = ++published_ % interval_ == 0;
    if (publishes || under_way == kAhead) settle();
    if (publishes) {
      publish();
      lap(seconds_.publish);
    }
  }
  if (under_way > 0) settle();
  const std::int64_t place = queues_.done->reserve(kAnswerTimeout);
  if (place < 0) throw QueueTimeoutError("The host did not read the training loop's progress for 60 s.");
  char* answer = queues_.done_memory + queues_.done->offset(static_cast<std::size_t>(place));
  td_error = done > 0 ? td_error / static_cast<double>(done) : 0.0;
  std::memcpy(answer, &done, sizeof done);
  std::memcpy(answer + kField, &td_error, sizeof td_error);
  queues_.done->publish(0);
  queues_.grants->release();
  return true;
}

std::vector<std::int64_t> DeviceLoop::last_indices() const {
  std::vector<std::int64_t> indices(sample_ == nullptr ? 0 : batch_size_);
  sycl::queue queue = learner_.queue().sycl();
  if (sample_ != nullptr) queue.memcpy(indices.data(), sample_->indices(), indices.size() * sizeof(std::int64_t)).wait();
  return indices;
}

std::vector<float> DeviceLoop::last_weights() const {
  std::vector<float> weights(sample_ == nullptr ? 0 : batch_size_);
  sycl::queue queue = learner_.queue().sycl();
  if (sample_ != nullptr) queue.memcpy(weights.data(), sample_->weights(), weights.size() * sizeof(float)).wait();
  return weights;
}

void DeviceLoop::last_column(std::size_t column, void* rows) const {
  sycl::queue queue = learner_.queue().sycl();
  const void* from = storage_->device_batch(batch_size_).column(column);
  queue.memcpy(rows, from, batch_size_ * storage_->row_bytes()[column]).wait();
}

}  // namespace pearl::device
