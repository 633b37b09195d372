#include "pearl/training_loop.hpp"

#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl {
namespace {

constexpr std::size_t kField = 64;  // fields of a slot begin at multiples of this
constexpr double kAnswerTimeout = 60.0;
// Between two batches drawn ahead: to wake a thread takes longer than drawing a small batch.
constexpr auto kLinger = std::chrono::microseconds(500);

}  // namespace

// Adds what passed since the last lap.
class TrainingLoop::Stopwatch {
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

void InsertionWindow::enter_sampling() {
  const auto free = [&] { return !wanted_.load(std::memory_order_seq_cst); };
  while (!free()) closed_.wait(free, std::numeric_limits<double>::infinity());
  mutex_.lock();
}

void TrainingLoop::check(const Queues& queues) {
  for (const SlotQueue* queue : {queues.grants, queues.done})
    if (queue->room() < kField + sizeof(std::int64_t))
      throw LearnerError("Grants and answers need slots of " + std::to_string(kField + sizeof(std::int64_t)) +
                         " bytes; found " + std::to_string(queue->room()) + ".");
}

TrainingLoop::TrainingLoop(SumTreeReplay& replay, const ColumnStore& storage, learner::Algorithm& algorithm,
                           std::size_t batch_size, const Queues& queues, std::vector<Weights> policy,
                           std::size_t interval, bool prefetch)
    : replay_(replay),
      storage_(storage),
      algorithm_(algorithm),
      queues_(queues),
      policy_(std::move(policy)),
      interval_(interval),
      drawn_(prefetch ? 2 : 1),
      priorities_(batch_size),
      prefetch_(prefetch),
      pool_(prefetch ? 2 : 1, kLinger) {
  if (batch_size < 1 || interval < 1)
    throw LearnerError("A training loop needs a batch and an interval of at least 1.");
  check(queues);
  std::size_t bytes[learner::kColumns];
  algorithm.item_bytes(bytes);
  if (storage.columns().size() != learner::kColumns)
    throw LearnerError("A training loop needs the five columns of transitions.");
  for (std::size_t i = 0; i < learner::kColumns; ++i) {
    const std::size_t stored = storage.columns()[i].item_bytes;
    if (stored != bytes[i])
      throw LearnerError("The Learner takes " + std::to_string(bytes[i]) + " bytes of column " + std::to_string(i) +
                         " of a transition; the Data Storage has " + std::to_string(stored) + ".");
    for (Drawn& drawn : drawn_) {
      drawn.columns.emplace_back(batch_size * stored);
      drawn.targets.push_back(drawn.columns.back().data());
    }
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
  for (Drawn& drawn : drawn_) {
    drawn.indices.resize(batch_size);
    drawn.weights.resize(batch_size);
    drawn.generations.resize(batch_size);
    const auto floats = [&](std::size_t i) { return reinterpret_cast<const float*>(drawn.columns[i].data()); };
    const void* actions = drawn.columns[1].data();
    drawn.batch = {batch_size, floats(0), actions, floats(2), floats(3), floats(4), drawn.weights.data()};
  }
  pool_.start();  // here, where it may throw: the Learner's threads, which offer batches, must not
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

void TrainingLoop::draw(Drawn& drawn, double beta, Stopwatch& watch, Seconds& spent) {
  window_.enter_sampling();
  try {
    replay_.sample(drawn.batch.rows, beta, drawn.indices.data(), drawn.weights.data(), drawn.generations.data());
    watch.lap(spent.sample);
    storage_.gather(drawn.indices.data(), drawn.batch.rows, storage_.capacity(), drawn.targets);
    watch.lap(spent.gather);
  } catch (...) {
    window_.leave_sampling();
    throw;
  }
  window_.leave_sampling();
}

void TrainingLoop::update(const Drawn& drawn) {
  replay_.update(drawn.indices.data(), priorities_.data(), drawn.generations.data(), drawn.batch.rows);
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
  std::exception_ptr failure;
  const auto draw_next = [&](std::size_t) {
    try {
      Stopwatch watch;
      Seconds elsewhere;
      update(drawn_[current_]);
      draw(drawn_[1 - current_], beta, watch, elsewhere);
    } catch (...) {
      failure = std::current_exception();
    }
  };
  const learner::PrioritiesKnown prefetching = [&] { pool_.offer(1, draw_next); }, alone;
  std::int64_t done = 0;
  const auto more = [&](std::int64_t after) { return after < iterations && !queues_.grants->closed(); };
  Stopwatch watch;
  // What was drawn ahead is trained, even where the grants have been closed since: it counts among the samplings.
  for (bool drawn = false; drawn || more(done); ++done) {
    if (!drawn) draw(drawn_[current_], beta, watch, seconds_);
    drawn = prefetch_ && more(done + 1);
    try {
      td_error += algorithm_.step(batch(), priorities_.data(), drawn ? prefetching : alone).td_error;
    } catch (...) {
      pool_.finish();
      throw;
    }
    watch.lap(seconds_.train);
    if (drawn) {
      pool_.finish();
      if (!failure) current_ = 1 - current_;
      watch.lap(seconds_.gather);
    } else {
      update(drawn_[current_]);
      watch.lap(seconds_.update);
    }
    if (++steps_ % interval_ == 0) {
      publish();
      watch.lap(seconds_.publish);
    }
    if (failure) std::rethrow_exception(failure);  // where the loop alone would have drawn
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
