// Shared by the bindings of pearl._native and pearl._sycl: structures on a caller's buffer, waits that Ctrl-C can
// interrupt, methods of training loops.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pearl/event_ring.hpp"
#include "pearl/futex.hpp"
#include "pearl/granted_loop.hpp"
#include "pearl/python_arrays.hpp"

namespace bindings {

// A structure on a caller's buffer. The buffer stays exported (an mmap refuses to close) while the structure lives.
template <class T>
struct OnBuffer : T {
  template <class... Args>
  explicit OnBuffer(py::buffer_info held, Args... args)
      : T(held.ptr, static_cast<std::size_t>(held.size * held.itemsize), args...), view(std::move(held)) {}
  py::buffer_info view;
};

// Runs `wait(timeout_s)` without the GIL, in slices so that Ctrl-C works; `done(result)` tells whether it succeeded.
template <class Wait, class Done>
auto interruptible(double timeout_s, Wait wait, Done done) {
  constexpr double kSlice = 0.1;
  if (!(timeout_s > 0.0)) return wait(0.0);
  const pearl::Deadline deadline(timeout_s);
  for (;;) {
    const double left = deadline.left();
    auto result = [&] {
      const Released released;
      return wait(std::clamp(left, 0.0, kSlice));
    }();
    if (done(result) || left <= 0.0) return result;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// The queues of a training loop, on the callers' buffers.
inline pearl::GrantedLoop::Queues loop_queues(OnBuffer<pearl::SlotQueue>& grants, OnBuffer<pearl::SlotQueue>& done,
                                              OnBuffer<pearl::Snapshot>& snapshot) {
  return {&grants, static_cast<const char*>(grants.view.ptr), &done, static_cast<char*>(done.view.ptr), &snapshot};
}

// The policy that a training loop publishes; the caller keeps the arrays alive.
inline std::vector<pearl::Weights> loop_weights(const std::vector<py::array>& arrays) {
  std::vector<pearl::Weights> weights;
  for (const py::array& array : arrays) {
    if (!py::isinstance<Array<float>>(array)) throw pearl::LearnerError("Weights must be contiguous float32.");
    weights.push_back({static_cast<const float*>(array.data()), static_cast<std::size_t>(array.size())});
  }
  return weights;
}

// Events as (part, start, end), in seconds of Python's time.perf_counter().
inline py::list listed(const pearl::EventRing& ring) {
  const auto seconds = [](pearl::EventRing::Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  py::list events;
  for (const pearl::EventRing::Event& event : ring.events())
    events.append(py::make_tuple(event.part, seconds(event.start), seconds(event.end)));
  return events;
}

// The methods that training loops share. Held::loop is a pearl::GrantedLoop.
template <class Held>
py::class_<Held>& bind_loop_methods(py::class_<Held>& cls) {
  return cls
      .def(
          "run_once",
          [](Held& held, double timeout_s) {
            const Released released;
            return held.loop.run_once(timeout_s);
          },
          py::arg("timeout_s"))
      .def("restart", [](Held& held) { held.loop.restart(); })
      .def("open_window",
           [](Held& held) {
             const Released released;
             held.loop.window().open();
           })
      .def("close_window", [](Held& held) { held.loop.window().close(); })
      .def("seconds", [](const Held& held) {
        const pearl::GrantedLoop::Seconds seconds = held.loop.seconds();
        py::dict out;
        out["sample"] = seconds.sample;
        out["gather"] = seconds.gather;
        out["train"] = seconds.train;
        out["update"] = seconds.update;
        out["publish"] = seconds.publish;
        return out;
      })
      .def("keep_events", [](Held& held, std::size_t most) { held.loop.keep_events(most); }, py::arg("most"))
      .def("events", [](const Held& held) { return listed(held.loop.events()); })
      .def("events_ahead", [](const Held& held) { return listed(held.loop.events_ahead()); });
}

inline constexpr auto is_true = [](bool result) { return result; };
inline constexpr auto is_slot = [](std::int64_t result) { return result >= 0; };

}  // namespace bindings
