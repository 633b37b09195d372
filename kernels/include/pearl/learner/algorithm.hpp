// The interface between the training loop and the learners: what a training step of any algorithm takes and returns.
#pragma once

#include <array>
#include <cstddef>
#include <functional>

namespace pearl::learner {

// Transitions, row by row, as the Data Storage gathers them.
struct Batch {
  std::size_t rows = 0;
  const void* obs = nullptr;         // (rows, inputs) float, or std::uint8_t where the networks take bytes
  const void* actions = nullptr;     // (rows,) std::int64_t, or (rows, action size) float
  const float* rewards = nullptr;    // (rows,)
  const void* next_obs = nullptr;    // the same
  const float* discounts = nullptr;  // (rows,) of the next value; 0 where the episode terminated
  const float* weights = nullptr;    // (rows,) importance weights
};

inline constexpr std::size_t kColumns = 5;  // of the Data Storage: all but the weights

struct StepMetrics {
  double loss = 0.0;
  double td_error = 0.0;  // mean |TD error|
  double gradient_norm = 0.0;
};

// Called once per step that returns, by any of its threads, as soon as all priorities are written and the loss is known
// to be finite. The rest of the step runs on meanwhile and may still throw. Must not throw.
using PrioritiesKnown = std::function<void()>;

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Bytes of one transition's observation, action, reward, next observation and discount.
  virtual std::array<std::size_t, kColumns> item_bytes() const = 0;
  // One step; writes the new priorities `(rows,)`; `known` may be empty. Throws LearnerError, and changes nothing, if it
  // diverges.
  virtual StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) = 0;
};

}  // namespace pearl::learner
