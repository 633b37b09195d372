// The Replay Manager as an autorun kernel: a thread that loops over its request queue until told to stop.
//
// A request is an operation code plus arrays (the paper's Fig. 6). The host is the only producer; responses exist for
// samples alone and come in order. The thread never takes Python's lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pearl/doorbell.hpp"
#include "pearl/futex.hpp"
#include "pearl/replay_operations.hpp"

namespace pearl {

class ReplayAutorun {
 public:
  // Arrays up to `max_batch` are carried without allocating; `depth` requests, and as many samples, may be pending.
  ReplayAutorun(ReplayOperations& replay, std::size_t max_batch, std::size_t depth);
  ~ReplayAutorun();
  ReplayAutorun(const ReplayAutorun&) = delete;
  ReplayAutorun& operator=(const ReplayAutorun&) = delete;

  // Called from the host side only. False if no slot came free in time. What can be checked is, before queueing.
  bool write_sample(std::size_t count, double beta, double timeout_s);
  bool write_update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                    std::size_t count, double timeout_s);
  bool write_insert(const std::int64_t* indices, const float* priorities, std::size_t count, double timeout_s);

  // Called from the host side only. Size of the oldest response, 0 if none has come; rethrows what went wrong.
  std::size_t response_size();
  // Copies the oldest response out and frees its place.
  void take_response(std::int64_t* indices, float* weights, std::uint32_t* generations);

  // Requests not yet done. Any thread.
  std::size_t pending() const;
  // False if requests are left after `timeout_s`.
  bool drain(double timeout_s);
  // Finishes what is queued, then joins. Writing afterwards throws QueueClosedError.
  void stop();
  // Rung at each response (and error). Before the first request.
  void attach_bell(Doorbell* bell) { bell_.store(bell, std::memory_order_release); }

 private:
  enum class Operation { kSample, kUpdate, kInsert };
  struct Request {
    Operation operation = Operation::kSample;
    std::size_t count = 0;
    double beta = 0.0;
    bool has_priorities = false;
    bool has_generations = false;
    std::vector<std::int64_t> indices;
    std::vector<float> priorities;
    std::vector<std::uint32_t> generations;
  };
  struct Response {
    std::size_t count = 0;
    std::vector<std::int64_t> indices;
    std::vector<float> weights;
    std::vector<std::uint32_t> generations;
  };

  Request* reserve(double timeout_s);
  void publish();
  void loop();
  void execute(Request& request);
  void fail(std::exception_ptr error);

  ReplayOperations& replay_;
  std::vector<Request> requests_;
  std::vector<Response> responses_;
  std::size_t unanswered_limit_;
  std::atomic<std::uint64_t> written_{0};    // by the host
  std::atomic<std::uint64_t> done_{0};       // by the thread
  std::atomic<std::uint64_t> asked_{0};      // samples written, by the host
  std::atomic<std::uint64_t> responded_{0};  // by the thread
  std::atomic<std::uint64_t> taken_{0};      // by the host
  std::atomic<std::uint64_t> failed_{0};     // samples without a response, by the thread
  std::atomic<bool> stopping_{false};
  std::atomic<bool> has_error_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  Signal work_{};
  Signal progress_{};
  std::atomic<Doorbell*> bell_{nullptr};
  std::thread thread_;
};

}  // namespace pearl
