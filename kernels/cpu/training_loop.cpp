#include "pearl/training_loop.hpp"

#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl {
namespace {

constexpr std::size_t kField = 64;  // fields of a slot begin at multiples of this
constexpr double kAnswerTimeout = 60.0;

// Adds what passed since the last lap.
class Stopwatch {
 public:
  void lap(double& seconds) {
    const auto now = Clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

void InsertionWindow::enter_sampling() {
  const auto free = [&] { return !wanted_.load(std::memory_order_seq_cst); };
  while (!free()) closed_.wait(free, std::numeric_limits<double>::infinity());
  mutex_.lock();
}

TrainingLoop::TrainingLoop(SumTreeReplay& replay, const ColumnStore& storage, learner::Algorithm& algorithm,
                           std::size_t batch_size, const Queues& queues, std::vector<Weights> policy,
                           std::size_t interval)
    : replay_(replay),
      storage_(storage),
      algorithm_(algorithm),
      queues_(queues),
      policy_(std::move(policy)),
      interval_(interval),
      indices_(batch_size),
      weights_(batch_size),
      generations_(batch_size),
      priorities_(batch_size) {
  if (batch_size < 1 || interval < 1) throw LearnerError("A training loop needs a batch and an interval of at least 1.");
  std::size_t bytes[learner::kColumns];
  algorithm.item_bytes(bytes);
  if (storage.columns().size() != learner::kColumns) throw LearnerError("A training loop needs the five columns of transitions.");
  for (std::size_t i = 0; i < learner::kColumns; ++i) {
    const std::size_t stored = storage.columns()[i].item_bytes;
    if (stored != bytes[i])
      throw LearnerError("The Learner takes " + std::to_string(bytes[i]) + " bytes of column " + std::to_string(i) +
                         " of a transition; the Data Storage has " + std::to_string(stored) + ".");
    columns_.emplace_back(batch_size * stored);
    targets_.push_back(columns_.back().data());
  }
  if (storage.capacity() != replay.capacity())
    throw LearnerError("Replay Manager and Data Storage differ in capacity: " + std::to_string(replay.capacity()) +
                       " and " + std::to_string(storage.capacity()) + ".");
  std::size_t count = 0;
  for (const Weights& piece : policy_) count += piece.count;
  if (count * sizeof(float) != queues.snapshot->payload_bytes())
    throw LearnerError("The policy has " + std::to_string(count) + " weights; the queue to the Actors takes " +
                       std::to_string(queues.snapshot->payload_bytes() / sizeof(float)) + ".");
  staging_.resize(count);
  const auto floats = [&](std::size_t i) { return reinterpret_cast<const float*>(columns_[i].data()); };
  batch_ = {batch_size, floats(0), columns_[1].data(), floats(2), floats(3), floats(4), weights_.data()};
  restart();
}

void TrainingLoop::publish() {
  float* to = staging_.data();
  for (const Weights& piece : policy_) {
    std::memcpy(to, piece.data, piece.count * sizeof(float));
    to += piece.count;
  }
  queues_.snapshot->write(staging_.data());
}

void TrainingLoop::restart() {
  steps_ = 0;
  publish();
}

bool TrainingLoop::run_once(double timeout_s) {
  const std::int64_t slot = queues_.grants->peek(timeout_s);
  if (slot < 0) return false;
  const char* grant = queues_.grants_memory + queues_.grants->offset(static_cast<std::size_t>(slot));
  std::int64_t iterations;
  double beta;
  std::memcpy(&iterations, grant, sizeof iterations);
  std::memcpy(&beta, grant + kField, sizeof beta);
  double td_error = 0.0;
  const std::size_t batch_size = batch_.rows;
  Stopwatch watch;
  std::int64_t done = 0;
  for (; done < iterations && !queues_.grants->closed(); ++done) {
    window_.enter_sampling();
    try {
      replay_.sample(batch_size, beta, indices_.data(), weights_.data(), generations_.data());
      watch.lap(seconds_.sample);
      storage_.gather(indices_.data(), batch_size, storage_.capacity(), targets_);
      watch.lap(seconds_.gather);
    } catch (...) {
      window_.leave_sampling();
      throw;
    }
    window_.leave_sampling();
    td_error += algorithm_.step(batch_, priorities_.data()).td_error;
    watch.lap(seconds_.train);
    replay_.update(indices_.data(), priorities_.data(), generations_.data(), batch_size);
    watch.lap(seconds_.update);
    if (++steps_ % interval_ == 0) {
      publish();
      watch.lap(seconds_.publish);
    }
  }
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

}  // namespace pearl
