#include "pearl/device/training_loop.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl::device {
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
  policy_ = {learner.queue(), policy_size(), Placement::pinned};
  restart();
}

void DeviceLoop::lap(double Seconds::* part) {
  if (times_parts_) learner_.queue().wait();
  watch_.lap(part);
}

void DeviceLoop::prepare(std::size_t count, double beta) {
  replay_->prepare_draws(count, batch_size_, beta);
  sample_ = replay_->device_batch();
  RowBatch& rows = storage_->device_batch(batch_size_);
  DeviceBatch batch;
  for (std::size_t i = 0; i < 5; ++i) batch.columns[i] = rows.column(i);
  batch.weights = sample_->weights();
  batch.priorities = priorities_.data();
  learner_.set_batch(batch_size_, batch);
  learner_.prepare(*steps_, count);
}

void DeviceLoop::launch_iteration(std::size_t place) {
  double Seconds::* const sample = times_parts_ ? &Seconds::sample : &Seconds::train;
  double Seconds::* const update = times_parts_ ? &Seconds::update : &Seconds::train;
  replay_->launch_draw(place, batch_size_, storage_.get(), learner_.failure());
  lap(sample);
  learner_.launch(place);
  lap(&Seconds::train);
  replay_->launch_update(sample_->indices(), priorities_.data(), sample_->generations(), batch_size_,
                         learner_.failure());
  lap(update);
}

// The prepared iterations; those that were launched before, as recorded.
void DeviceLoop::launch_iterations(std::size_t count) {
  const auto launch = [&] {
    for (std::size_t place = 0; place < count; ++place) launch_iteration(place);
  };
  DeviceQueue& queue = learner_.queue();
  if (times_parts_ || !queue.records()) return launch();
  const DeviceLearner::Kind kind = learner_.kind(count);
  const Places places{kind.build, sample_->arrays(), sample_->indices(), sample_->generations(),
                      storage_->device_batch(batch_size_).copies()};
  if (places != std::exchange(places_, places)) recorded_.clear();
  const auto known = std::find_if(recorded_.begin(), recorded_.end(), [&](const Recorded& recorded) {
    return recorded.iterations == count && recorded.kind == kind;
  });
  if (known == recorded_.end()) {
    launch();  // also makes what launches need
    recorded_.push_back({count, kind, nullptr});
    return;
  }
  if (known->launches == nullptr) known->launches = queue.record(launch);
  replay_->launch(*known->launches);
}

LearnerMetrics DeviceLoop::finish() {
  LearnerMetrics metrics;
  try {
    metrics = learner_.finish();
  } catch (const LearnerError&) {
    try {
      replay_->check_waited();  // clears a refusal
    } catch (const ReplayError&) {
    }
    throw;
  }
  *steps_ += metrics.steps;
  replay_->count_updates(static_cast<std::size_t>(metrics.steps) * batch_size_);
  replay_->check_waited();
  return metrics;
}

GrantedLoop::Progress DeviceLoop::run_iterations(std::int64_t iterations, double beta) {
  Progress done;
  watch_.begin();
  while (wants_more(done.iterations, iterations)) {
    // Powers of two: grants of any length need few recordings.
    const auto left = static_cast<std::size_t>(iterations - done.iterations);
    const std::size_t count = std::bit_floor(std::min({left, until_publishing(), kMostAhead}));
    window_.enter_sampling();
    try {
      prepare(count, beta);
      launch_iterations(count);
    } catch (...) {
      window_.leave_sampling();
      throw;
    }
    window_.leave_sampling();
    const bool fetches = until_publishing() == count && !learner_.queue().is_cpu();
    if (fetches) fetch_policy();
    const LearnerMetrics metrics = finish();
    lap(&Seconds::train);
    done.td_error += metrics.td_error * static_cast<double>(metrics.steps);
    done.iterations += static_cast<std::int64_t>(count);
    if (!counts_to_publish(count)) continue;
    publish(fetches ? policy_.data() : policy_in_one());
    lap(&Seconds::publish);
  }
  return done;
}

const float* DeviceLoop::policy_in_one() {
  if (learner_.queue().is_cpu()) return GrantedLoop::policy_in_one();
  fetch_policy();
  learner_.queue().wait();
  return policy_.data();
}

// Enqueues copies of the policy to pinned memory, complete when the queue was waited for: managed memory that the host
// reads itself would move to the host and back.
void DeviceLoop::fetch_policy() {
  float* to = policy_.data();
  for (auto piece = policy().begin(); piece != policy().end();) {
    const float* const from = piece->data;
    std::size_t count = 0;
    for (; piece != policy().end() && piece->data == from + count; ++piece) count += piece->count;  // one after another
    learner_.queue().copy_async(from, to, count * sizeof(float));
    to += count;
  }
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
