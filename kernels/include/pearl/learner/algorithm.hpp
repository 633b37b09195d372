// The interface between the training loop and the learners: arguments and results of a training step of any algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

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
  const std::uint8_t* next_masks = nullptr;  // (rows, actions): 0 where next_obs forbids an action; null: all allowed
};

inline constexpr std::size_t kColumns = 5;  // of all transitions: from obs to discounts

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
  // Bytes of one transition's observation, action, reward, next observation and discount; then, with action masks, of
  // its next mask.
  virtual std::vector<std::size_t> item_bytes() const = 0;
  // One step; writes the new priorities `(rows,)`; `known` may be empty. Throws LearnerError, and changes nothing, if it
  // diverges.
  virtual StepMetrics step(const Batch& batch, float* priorities, const PrioritiesKnown& known) = 0;
};

}  // namespace pearl::learner
