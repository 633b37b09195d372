// The common part of the learners of all algorithms: one worker per thread of a team; gradients that are added up,
// checked, clipped and applied; and the moment when all priorities are known.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "pearl/errors.hpp"
#include "pearl/learner/algorithm.hpp"
#include "pearl/learner/gradients.hpp"
#include "pearl/learner/optimizer.hpp"
#include "pearl/learner/team.hpp"

namespace pearl::learner {

// Sums over a worker's transitions.
struct WorkerSums {
  double loss = 0.0, td_error = 0.0;
};

// Worker derives from WorkerSums.
template <class Worker>
class TeamLearner {
 public:
  std::size_t threads() const { return team_.size(); }

 protected:
  // Of a network's training step: the sum of losses, and the norm of the gradients.
  struct Outcome {
    double loss = 0.0, norm = 0.0;
    bool finite() const { return std::isfinite(loss) && std::isfinite(norm); }
  };

  TeamLearner(const LearnerKernels& kernels, std::size_t threads) : kernels_(kernels), team_(threads) {}

  // Returns whether the number of rows differs from the last batch's.
  bool resizes(std::size_t rows) {
    const bool differs = rows != rows_;
    rows_ = rows;
    return differs;
  }

  double sum(double Worker::*value) const {
    double total = 0.0;
    for (const auto& worker : workers_) total += (*worker).*value;
    return total;
  }

  // Called by every worker when its gradients are complete: adds them up and, if the outcome is finite, moves its range
  // of the weights. Returns whether it is finite, the same for every worker; worker 0 stores it in `outcome`.
  bool apply(std::size_t worker, TeamGradients& gradients, std::size_t used, double Worker::*loss,
             const Optimizer& optimizer, double max_norm, float* weights, Outcome& outcome) {
    team_.barrier();
    gradients.reduce(kernels_, worker, used);
    team_.barrier();
    const Outcome found{sum(loss), gradients.norm()};
    if (worker == 0) outcome = found;
    if (!found.finite()) return false;
    optimizer.apply(kernels_, clip_factor(found.norm, max_norm), gradients.of(0), weights, gradients.begin(worker),
                    gradients.end(worker));
    return true;
  }

  // Called once per step by every worker; the last one reports that the priorities are known. Not inlined: the caller's
  // loops ran 2% slower then, even without prefetching.
  [[gnu::noinline, gnu::cold]] void priorities_written(const PrioritiesKnown& known) {
    if (!known || writing_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (std::isfinite(sum(&Worker::loss))) known();
  }

  [[noreturn]] static void diverged(const std::string& whose, const Outcome& outcome, const char* state) {
    throw LearnerError("The training step diverged: the " + whose + "loss is " + std::to_string(outcome.loss) +
                       ", the gradients' norm " + std::to_string(outcome.norm) + ". " + state +
                       " Look at the batch for NaN or huge observations and rewards; a smaller learning rate or " +
                       "max_grad_norm may help.");
  }

  // The metrics of a step over `rows` transitions.
  StepMetrics metrics(const Outcome& outcome, std::size_t rows) const {
    const auto count = static_cast<double>(rows);
    return {outcome.loss / count, sum(&Worker::td_error) / count, outcome.norm};
  }

  const LearnerKernels& kernels_;
  Team team_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<std::size_t> writing_ = 0;  // workers whose priorities are still to come

 private:
  std::size_t rows_ = 0;
};

}  // namespace pearl::learner
