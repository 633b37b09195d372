#include "pearl/replay_autorun.hpp"

#include <algorithm>

#include "pearl/errors.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/threads.hpp"

namespace pearl {
namespace {

constexpr int kSpins = 400;  // a request that follows closely is taken without a system call

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ReplayAutorun::ReplayAutorun(ReplayOperations& replay, std::size_t max_batch, std::size_t depth)
    : replay_(replay), requests_(std::max<std::size_t>(depth, 1)), responses_(requests_.size()),
      unanswered_limit_(requests_.size()) {
  for (Request& request : requests_) {
    request.indices.reserve(max_batch);
    request.priorities.reserve(max_batch);
    request.generations.reserve(max_batch);
  }
  for (Response& response : responses_) {
    response.indices.reserve(max_batch);
    response.weights.reserve(max_batch);
    response.generations.reserve(max_batch);
  }
  thread_ = start_thread([this] { loop(); });
}

ReplayAutorun::~ReplayAutorun() { stop(); }

ReplayAutorun::Request* ReplayAutorun::reserve(double timeout_s) {
  if (stopping_.load(std::memory_order_acquire)) throw QueueClosedError("The Replay Manager's queue is closed.");
  const std::uint64_t written = written_.load(std::memory_order_relaxed);
  const bool free = progress_.wait(
      [&] { return written - done_.load(std::memory_order_acquire) < requests_.size(); }, timeout_s);
  return free ? &requests_[written % requests_.size()] : nullptr;
}

void ReplayAutorun::publish() {
  written_.fetch_add(1, std::memory_order_release);
  work_.ring();
}

bool ReplayAutorun::write_sample(std::size_t count, double beta, double timeout_s) {
  check_exponent("beta", beta);
  if (count < 1) throw ReplayError("batch_size must be at least 1; found 0.");
  // Bounding the unanswered samples here means that the thread never waits for the host to poll.
  const std::uint64_t settled = taken_.load(std::memory_order_relaxed) + failed_.load(std::memory_order_acquire);
  if (asked_.load(std::memory_order_relaxed) - settled >= unanswered_limit_)
    throw QueueTimeoutError(std::to_string(unanswered_limit_) +
                            " samples wait to be polled: poll() before asking for more.");
  Request* request = reserve(timeout_s);
  if (request == nullptr) return false;
  request->operation = Operation::kSample;
  request->count = count;
  request->beta = beta;
  asked_.fetch_add(1, std::memory_order_relaxed);
  publish();
  return true;
}

bool ReplayAutorun::write_update(const std::int64_t* indices, const float* priorities,
                                 const std::uint32_t* generations, std::size_t count, double timeout_s) {
  if (replay_.prioritized()) {
    check_indices(indices, count, replay_.capacity());
    check_priorities(priorities, count);
  }
  Request* request = reserve(timeout_s);
  if (request == nullptr) return false;
  request->operation = Operation::kUpdate;
  request->count = count;
  request->has_priorities = true;
  request->has_generations = generations != nullptr;
  request->indices.assign(indices, indices + count);
  request->priorities.assign(priorities, priorities + count);
  if (generations != nullptr) request->generations.assign(generations, generations + count);
  publish();
  return true;
}

bool ReplayAutorun::write_insert(const std::int64_t* indices, const float* priorities, std::size_t count,
                                 double timeout_s) {
  check_indices(indices, count, replay_.capacity());
  if (priorities != nullptr) check_priorities(priorities, count);
  Request* request = reserve(timeout_s);
  if (request == nullptr) return false;
  request->operation = Operation::kInsert;
  request->count = count;
  request->has_priorities = priorities != nullptr;
  request->indices.assign(indices, indices + count);
  if (priorities != nullptr) request->priorities.assign(priorities, priorities + count);
  publish();
  return true;
}

std::size_t ReplayAutorun::response_size() {
  if (has_error_.load(std::memory_order_acquire)) {
    std::exception_ptr error;
    {
      const std::lock_guard lock(error_mutex_);
      std::swap(error, error_);
      has_error_.store(false, std::memory_order_release);
    }
    if (error) std::rethrow_exception(error);
  }
  const std::uint64_t taken = taken_.load(std::memory_order_relaxed);
  if (responded_.load(std::memory_order_acquire) == taken) return 0;
  return responses_[taken % responses_.size()].count;
}

void ReplayAutorun::take_response(std::int64_t* indices, float* weights, std::uint32_t* generations) {
  const std::uint64_t taken = taken_.load(std::memory_order_relaxed);
  const Response& response = responses_[taken % responses_.size()];
  std::copy(response.indices.begin(), response.indices.end(), indices);
  std::copy(response.weights.begin(), response.weights.end(), weights);
  std::copy(response.generations.begin(), response.generations.end(), generations);
  taken_.store(taken + 1, std::memory_order_release);
}

std::size_t ReplayAutorun::pending() const {
  const std::uint64_t done = done_.load(std::memory_order_acquire);
  return static_cast<std::size_t>(written_.load(std::memory_order_acquire) - done);
}

bool ReplayAutorun::drain(double timeout_s) {
  return progress_.wait([&] { return pending() == 0; }, timeout_s);
}

void ReplayAutorun::stop() {
  stopping_.store(true, std::memory_order_release);
  work_.ring();
  if (thread_.joinable()) thread_.join();
}

void ReplayAutorun::fail(std::exception_ptr error) {
  const std::lock_guard lock(error_mutex_);
  if (!error_) error_ = std::move(error);  // the first tells most
  has_error_.store(true, std::memory_order_release);
}

void ReplayAutorun::execute(Request& request) {
  const float* priorities = request.has_priorities ? request.priorities.data() : nullptr;
  switch (request.operation) {
    case Operation::kSample: {
      const std::uint64_t responded = responded_.load(std::memory_order_relaxed);
      Response& response = responses_[responded % responses_.size()];
      response.count = request.count;
      response.indices.resize(request.count);
      response.weights.resize(request.count);
      response.generations.resize(request.count);
      replay_.sample(request.count, request.beta, response.indices.data(), response.weights.data(),
                     response.generations.data());
      responded_.store(responded + 1, std::memory_order_release);
      break;
    }
    case Operation::kUpdate:
      replay_.update(request.indices.data(), priorities,
                     request.has_generations ? request.generations.data() : nullptr, request.count);
      break;
    case Operation::kInsert:
      replay_.insert(request.indices.data(), priorities, request.count);
      break;
  }
}

void ReplayAutorun::loop() {
  std::uint64_t done = 0;
  const auto ready = [&] {
    return written_.load(std::memory_order_acquire) != done || stopping_.load(std::memory_order_acquire);
  };
  for (;;) {
    for (int spin = 0; spin < kSpins && !ready(); ++spin) pause_briefly();
    while (!ready()) work_.wait(ready, 3600.0);
    if (written_.load(std::memory_order_acquire) == done) return;  // stopping, and everything queued is done
    Request& request = requests_[done % requests_.size()];
    const bool samples = request.operation == Operation::kSample;
    bool failed = false;
    try {
      execute(request);
    } catch (...) {
      failed = true;
      fail(std::current_exception());
      if (samples) failed_.fetch_add(1, std::memory_order_release);
    }
    done_.store(++done, std::memory_order_release);
    progress_.ring();
    Doorbell* bell = bell_.load(std::memory_order_acquire);
    if (bell != nullptr && (samples || failed)) bell->ring();
  }
}

}  // namespace pearl
