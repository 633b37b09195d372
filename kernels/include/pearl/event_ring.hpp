// The newest events of one thread, for a trace: which part of its work it did, and from when to when.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace pearl {

class EventRing {
 public:
  using Clock = std::chrono::steady_clock;
  struct Event {
    const char* part;  // a string literal
    Clock::time_point start, end;
  };

  // Keeps the newest `most` events from now on; 0, as after construction, keeps none. Only while the thread rests.
  void keep(std::size_t most) {
    events_.assign(most, Event{});
    recorded_ = 0;
  }
  // Called from the thread only.
  void record(const char* part, Clock::time_point start, Clock::time_point end) {
    if (!events_.empty()) events_[recorded_++ % events_.size()] = {part, start, end};
  }
  // The events kept, oldest first. Only while the thread rests.
  std::vector<Event> events() const {
    if (recorded_ <= events_.size()) return {events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(recorded_)};
    const auto oldest = events_.begin() + static_cast<std::ptrdiff_t>(recorded_ % events_.size());
    std::vector<Event> found(oldest, events_.end());
    found.insert(found.end(), events_.begin(), oldest);
    return found;
  }

 private:
  std::vector<Event> events_;
  std::size_t recorded_ = 0;
};

}  // namespace pearl
