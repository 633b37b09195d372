// The gradients of a team's workers: adding them up, and their norm.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/learner/kernels.hpp"
#include "pearl/learner/team.hpp"

namespace pearl::learner {

// One gradient vector per worker of a team. Adds in the order of the workers, so that equal teams give equal sums.
class TeamGradients {
 public:
  TeamGradients(std::size_t workers, std::size_t parameters) : parameters_(parameters), squares_(workers) {
    for (std::size_t worker = 0; worker < workers; ++worker) vectors_.emplace_back(parameters);
  }

  float* of(std::size_t worker) { return vectors_[worker].data(); }

  // The range of parameters that one worker adds up and moves: whole cache lines.
  std::size_t begin(std::size_t worker) const {
    const std::size_t lines = (parameters_ + 15) / 16;
    const std::size_t at = 16 * (lines * worker / vectors_.size());
    return at < parameters_ ? at : parameters_;
  }
  std::size_t end(std::size_t worker) const { return begin(worker + 1); }

  // Called by every worker, between barriers: adds its range up into of(0). Workers from `used` on had no transitions.
  void reduce(const LearnerKernels& kernels, std::size_t worker, std::size_t used) {
    const std::size_t first = begin(worker), count = end(worker) - first;
    for (std::size_t other = 1; other < used; ++other) kernels.add(of(other) + first, of(0) + first, count);
    squares_[worker].value = kernels.sum_of_squares(of(0) + first, count);
  }

  // After reduce() and a barrier: the norm of all gradients, the same for every worker.
  double norm() const {
    double sum = 0.0;
    for (const Padded& square : squares_) sum += square.value;
    return std::sqrt(sum);
  }

 private:
  struct alignas(kCacheLine) Padded {
    double value = 0.0;
  };

  std::size_t parameters_;
  std::vector<AlignedArray<float>> vectors_;
  std::vector<Padded> squares_;
};

}  // namespace pearl::learner
