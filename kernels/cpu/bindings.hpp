// What the bindings of pearl._native and pearl._sycl share: structures on a caller's buffer, waits that Ctrl-C ends,
// seconds of training loops.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "pearl/futex.hpp"
#include "pearl/python_arrays.hpp"

namespace bindings {

// A structure on a caller's buffer, which stays exported (an mmap refuses to close) while the structure lives.
template <class T>
struct OnBuffer : T {
  template <class... Args>
  explicit OnBuffer(py::buffer_info held, Args... args)
      : T(held.ptr, static_cast<std::size_t>(held.size * held.itemsize), args...), view(std::move(held)) {}
  py::buffer_info view;
};

// Runs `wait(timeout_s)` without Python's lock in slices, so that Ctrl-C is seen; `done` tells its success.
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

// A training loop's seconds by their parts.
template <class Seconds>
py::dict seconds_dict(const Seconds& seconds) {
  py::dict out;
  out["sample"] = seconds.sample;
  out["gather"] = seconds.gather;
  out["train"] = seconds.train;
  out["update"] = seconds.update;
  out["publish"] = seconds.publish;
  return out;
}

inline constexpr auto is_true = [](bool result) { return result; };
inline constexpr auto is_slot = [](std::int64_t result) { return result >= 0; };

}  // namespace bindings
