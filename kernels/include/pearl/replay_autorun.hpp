// The Replay Manager as an autorun kernel: a thread that loops over its request queue until told to stop.
//
// A request is an operation code plus arrays (the paper's Fig. 6). The host is the only producer. Only samples get
// responses, in order. The thread never takes the GIL.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "pearl/doorbell.hpp"
#include "pearl/event_ring.hpp"
#include "pearl/futex.hpp"
#include "pearl/replay_operations.hpp"

namespace pearl {

class ReplayAutorun {
 public:
  // Arrays up to `max_batch` need no allocation; up to `depth` requests and as many unpolled samples may be pending.
  ReplayAutorun(ReplayOperations& replay, std::size_t max_batch, std::size_t depth);
  ~ReplayAutorun();
  ReplayAutorun(const ReplayAutorun&) = delete;
  ReplayAutorun& operator=(const ReplayAutorun&) = delete;

  // Called from the host side only. Arguments are checked before queueing. False if no slot came free in time.
  bool write_sample(std::size_t count, double beta, double timeout_s);
  bool write_update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                    std::size_t count, double timeout_s);
  bool write_insert(const std::int64_t* indices, const float* priorities, std::size_t count, double timeout_s);

  // Called from the host side only. Size of the oldest response, 0 if none has come; rethrows a request's error.
  std::size_t response_size();
  // Copies the oldest response out and frees its slot.
  void take_response(std::int64_t* indices, float* weights, std::uint32_t* generations);

  // Requests not yet done. Any thread.
  std::size_t pending() const;
  // False if requests are left after `timeout_s`.
  bool drain(double timeout_s);
  // Finishes what is queued, then joins. Writing afterwards throws QueueClosedError.
  void stop();
  // The bell rings at each response and error. Call before the first request.
  void attach_bell(Doorbell* bell) { bell_.store(bell, std::memory_order_release); }

  enum class Operation { kSample, kUpdate, kInsert };
  // Seconds that the thread spent on requests of one kind since construction. Any thread.
  double seconds(Operation operation) const {
    return 1e-9 * static_cast<double>(spent_ns_[static_cast<std::size_t>(operation)].load(std::memory_order_relaxed));
  }
  // Keeps the newest `most` requests as events; at first none. Call before the first request.
  void keep_events(std::size_t most) { events_.keep(most); }
  // Only after stop().
  const EventRing& events() const { return events_; }

 private:
  struct Items {
    std::size_t count = 0;
    std::vector<std::int64_t> indices;
    std::vector<float> values;  // priorities of a request, weights of a response
    std::vector<std::uint32_t> generations;
    void reserve(std::size_t most) {
      indices.reserve(most);
      values.reserve(most);
      generations.reserve(most);
    }
  };
  struct Request : Items {
    Operation operation = Operation::kSample;
    double beta = 0.0;
    bool has_priorities = false;
    bool has_generations = false;
  };

  // Queues a request whose arrays fill(request) sets; false if no slot came free in time.
  template <class Fill>
  bool write(Operation operation, std::size_t count, double timeout_s, Fill fill);
  void loop();
  void execute(Request& request);
  void count_time(Operation operation, EventRing::Clock::time_point start);
  void fail(std::exception_ptr error);

  ReplayOperations& replay_;
  std::vector<Request> requests_;
  std::vector<Items> responses_;
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
  std::array<std::atomic<std::int64_t>, 3> spent_ns_{};  // by the thread, for each operation
  EventRing events_;
  Signal work_{};
  Signal progress_{};
  std::atomic<Doorbell*> bell_{nullptr};
  std::thread thread_;
};

}  // namespace pearl
