#include "pearl/granted_loop.hpp"

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl {
namespace {

constexpr std::size_t kField = 64;  // fields of a slot begin at multiples of this
constexpr double kAnswerTimeout = 60.0;

}  // namespace

void InsertionWindow::enter_sampling() {
  const auto free = [&] { return !wanted_.load(std::memory_order_seq_cst); };
  while (!free()) closed_.wait(free, std::numeric_limits<double>::infinity());
  mutex_.lock();
}

GrantedLoop::GrantedLoop(std::size_t batch_size, const Queues& queues, std::vector<Weights> policy,
                         std::size_t interval)
    : queues_(queues), policy_(std::move(policy)), interval_(interval) {
  if (batch_size < 1 || interval < 1)
    throw LearnerError("A training loop needs a batch and an interval of at least 1.");
  for (const SlotQueue* queue : {queues.grants, queues.done})
    if (queue->room() < kField + sizeof(std::int64_t))
      throw LearnerError("Grants and answers need slots of " + std::to_string(kField + sizeof(std::int64_t)) +
                         " bytes; found " + std::to_string(queue->room()) + ".");
  std::size_t count = 0;
  for (const Weights& piece : policy_) count += piece.count;
  if (count * sizeof(float) != queues.snapshot->payload_bytes())
    throw LearnerError("The policy has " + std::to_string(count) + " weights; the queue to the Actors takes " +
                       std::to_string(queues.snapshot->payload_bytes() / sizeof(float)) + ".");
  staging_.resize(count);
}

void GrantedLoop::check_rows(const std::vector<std::size_t>& taken_bytes, const std::vector<std::size_t>& stored_bytes,
                             std::size_t replay_capacity, std::size_t storage_capacity) {
  if (stored_bytes.size() != taken_bytes.size())
    throw LearnerError("The Learner takes " + std::to_string(taken_bytes.size()) +
                       " columns of a transition; the Data Storage has " + std::to_string(stored_bytes.size()) + ".");
  for (std::size_t i = 0; i < taken_bytes.size(); ++i)
    if (stored_bytes[i] != taken_bytes[i])
      throw LearnerError("The Learner takes " + std::to_string(taken_bytes[i]) + " bytes of column " +
                         std::to_string(i) + " of a transition; the Data Storage has " +
                         std::to_string(stored_bytes[i]) + ".");
  if (storage_capacity != replay_capacity)
    throw LearnerError("Replay Manager and Data Storage differ in capacity: " + std::to_string(replay_capacity) +
                       " and " + std::to_string(storage_capacity) + ".");
}

const float* GrantedLoop::policy_in_one() {
  float* to = staging_.data();
  for (const Weights& piece : policy_) {
    std::memcpy(to, piece.data, piece.count * sizeof(float));
    to += piece.count;
  }
  return staging_.data();
}

void GrantedLoop::publish(const float* policy) { queues_.snapshot->write(policy); }

void GrantedLoop::restart() {
  steps_ = 0;
  publish();
}

bool GrantedLoop::run_once(double timeout_s) {
  const std::int64_t slot = queues_.grants->peek(timeout_s);
  if (slot < 0) return false;
  const char* grant = queues_.grants_memory + queues_.grants->offset(static_cast<std::size_t>(slot));
  std::int64_t iterations;
  double beta;
  std::memcpy(&iterations, grant, sizeof iterations);
  std::memcpy(&beta, grant + kField, sizeof beta);
  const Progress done = run_iterations(iterations, beta);
  const std::int64_t place = queues_.done->reserve(kAnswerTimeout);
  if (place < 0) throw QueueTimeoutError("The host did not read the training loop's progress for 60 s.");
  char* answer = queues_.done_memory + queues_.done->offset(static_cast<std::size_t>(place));
  const double td_error = done.iterations > 0 ? done.td_error / static_cast<double>(done.iterations) : 0.0;
  std::memcpy(answer, &done.iterations, sizeof done.iterations);
  std::memcpy(answer + kField, &td_error, sizeof td_error);
  queues_.done->publish(0);
  queues_.grants->release();
  return true;
}

}  // namespace pearl
