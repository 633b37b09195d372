#include "pearl/replay_autorun.hpp"

#include <algorithm>

#include "pearl/errors.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/threads.hpp"

namespace pearl {
namespace {

constexpr int kSpins = 400;  // a request that follows closely needs no system call

}  // namespace

ReplayAutorun::ReplayAutorun(ReplayOperations& replay, std::size_t max_batch, std::size_t depth)
    : replay_(replay), requests_(std::max<std::size_t>(depth, 1)), responses_(requests_.size()) {
  for (Request& request : requests_) request.reserve(max_batch);
  for (Items& response : responses_) response.reserve(max_batch);
  thread_ = start_thread([this] { loop(); });
}

ReplayAutorun::~ReplayAutorun() { stop(); }

template <class Fill>
bool ReplayAutorun::write(Operation operation, std::size_t count, double timeout_s, Fill fill) {
  if (stopping_.load(std::memory_order_acquire)) throw QueueClosedError("The Replay Manager's queue is closed.");
  const std::uint64_t written = written_.load(std::memory_order_relaxed);
  const auto free = [&] { return written - done_.load(std::memory_order_acquire) < requests_.size(); };
  if (!progress_.wait(free, timeout_s)) return false;
  Request& request = requests_[written % requests_.size()];
  request.operation = operation;
  request.count = count;
  fill(request);
  written_.store(written + 1, std::memory_order_release);
  work_.ring();
  return true;
}

bool ReplayAutorun::write_sample(std::size_t count, double beta, double timeout_s) {
  check_exponent("beta", beta);
  if (count < 1) throw ReplayError("batch_size must be at least 1; found 0.");
  // The limit on unanswered samples here lets the thread never wait for the host to poll.
  const std::uint64_t settled = taken_.load(std::memory_order_relaxed) + failed_.load(std::memory_order_acquire);
  if (asked_.load(std::memory_order_relaxed) - settled >= responses_.size())
    throw QueueTimeoutError(std::to_string(responses_.size()) +
                            " samples wait to be polled: poll() before asking for more.");
  return write(Operation::kSample, count, timeout_s, [&](Request& request) {
    request.beta = beta;
    asked_.fetch_add(1, std::memory_order_relaxed);
  });
}

bool ReplayAutorun::write_update(const std::int64_t* indices, const float* priorities,
                                 const std::uint32_t* generations, std::size_t count, double timeout_s) {
  if (replay_.prioritized()) {
    check_indices(indices, count, replay_.capacity());
    check_priorities(priorities, count);
  }
  return write(Operation::kUpdate, count, timeout_s, [&](Request& request) {
    request.has_priorities = true;
    request.has_generations = generations != nullptr;
    request.indices.assign(indices, indices + count);
    request.values.assign(priorities, priorities + count);
    if (generations != nullptr) request.generations.assign(generations, generations + count);
  });
}

bool ReplayAutorun::write_insert(const std::int64_t* indices, const float* priorities, std::size_t count,
                                 double timeout_s) {
  check_indices(indices, count, replay_.capacity());
  if (priorities != nullptr) check_priorities(priorities, count);
  return write(Operation::kInsert, count, timeout_s, [&](Request& request) {
    request.has_priorities = priorities != nullptr;
    request.indices.assign(indices, indices + count);
    if (priorities != nullptr) request.values.assign(priorities, priorities + count);
  });
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
  const Items& response = responses_[taken % responses_.size()];
  std::copy(response.indices.begin(), response.indices.end(), indices);
  std::copy(response.values.begin(), response.values.end(), weights);
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
  if (!error_) error_ = std::move(error);  // the first error tells most
  has_error_.store(true, std::memory_order_release);
}

void ReplayAutorun::execute(Request& request) {
  const float* priorities = request.has_priorities ? request.values.data() : nullptr;
  switch (request.operation) {
    case Operation::kSample: {
      const std::uint64_t responded = responded_.load(std::memory_order_relaxed);
      Items& response = responses_[responded % responses_.size()];
      response.count = request.count;
      response.indices.resize(request.count);
      response.values.resize(request.count);
      response.generations.resize(request.count);
      replay_.sample(request.count, request.beta, response.indices.data(), response.values.data(),
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

void ReplayAutorun::count_time(Operation operation, EventRing::Clock::time_point start) {
  constexpr const char* kNames[] = {"sample", "update", "insert"};
  const auto now = EventRing::Clock::now();
  const auto kind = static_cast<std::size_t>(operation);
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(now - start).count();
  spent_ns_[kind].store(spent_ns_[kind].load(std::memory_order_relaxed) + spent, std::memory_order_relaxed);
  events_.record(kNames[kind], start, now);
}

void ReplayAutorun::loop() {
  std::uint64_t done = 0;
  const auto ready = [&] {
    return written_.load(std::memory_order_acquire) != done || stopping_.load(std::memory_order_acquire);
  };
  for (;;) {
    for (int spin = 0; spin < kSpins && !ready(); ++spin) relax();
    while (!ready()) work_.wait(ready, 3600.0);
    if (written_.load(std::memory_order_acquire) == done) return;  // stopping, and everything queued is done
    Request& request = requests_[done % requests_.size()];
    const bool samples = request.operation == Operation::kSample;
    const auto start = EventRing::Clock::now();
    bool failed = false;
    try {
      execute(request);
    } catch (...) {
      failed = true;
      fail(std::current_exception());
      if (samples) failed_.fetch_add(1, std::memory_order_release);
    }
    count_time(request.operation, start);
    done_.store(++done, std::memory_order_release);
    progress_.ring();
    Doorbell* bell = bell_.load(std::memory_order_acquire);
    if (bell != nullptr && (samples || failed)) bell->ring();
  }
}

}  // namespace pearl
