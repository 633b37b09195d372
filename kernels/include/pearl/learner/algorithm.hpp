// What a training step takes and gives, whatever the algorithm: the seam between the loop and the learners.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace pearl::learner {

// Transitions, row by row, as the Data Storage gathers them.
struct Batch {
  std::size_t rows = 0;
  const float* obs = nullptr;        // (rows, inputs)
  const void* actions = nullptr;     // (rows,) std::int64_t, or (rows, action size) float
  const float* rewards = nullptr;    // (rows,)
  const float* next_obs = nullptr;   // (rows, inputs)
  const float* discounts = nullptr;  // (rows,) of the next value; 0 where the episode terminated
  const float* weights = nullptr;    // (rows,) importance weights
};

inline constexpr std::size_t kColumns = 5;  // of the Data Storage: all but the weights

struct StepMetrics {
  double loss = 0.0;
  double td_error = 0.0;  // the mean of the absolute ones
  double gradient_norm = 0.0;
};

// Called once in every step that returns, by any of its threads, as soon as all priorities are written and the loss is
// known to be finite: the rest of the step goes on meanwhile, and may still throw. Must not throw.
using PrioritiesKnown = std::function<void()>;

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Bytes of one transition's observation, action, reward, next observation and discount.
  virtual void item_bytes(std::size_t (&bytes)[kColumns]) const = 0;
  // One step; writes the new priorities `(rows,)`; `known` may be empty. Throws LearnerError, with nothing changed,
  // where it diverges.
  virtual StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) = 0;
};

}  // namespace pearl::learner
