// The parameters of several Learners as one vector, their mean, and how a Learner applies it: local SGD
// (docs/local_sgd.md). The reference in NumPy is in tests/test_local_sgd.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/snapshot.hpp"

namespace pearl {

// out[i] = mean of vectors[0][i], vectors[1][i], ...: added in this order in double, divided, and rounded once.
void mean_of(const std::vector<const float*>& vectors, std::size_t count, float* out);

// The same, published as the next version of `snapshot`, whose payload is `head` and then the mean; that version.
std::uint64_t write_mean(Snapshot& snapshot, const void* head, std::size_t head_bytes,
                         const std::vector<const float*>& vectors, std::size_t count);

// Arrays of a trainer, one after another the parts of a vector. Whoever makes this keeps the arrays alive.
class ParameterArrays {
 public:
  struct Part {
    float* values;
    std::size_t count;
    bool bounded;  // a statistic, not a trained parameter: see `correct`
  };

  explicit ParameterArrays(std::vector<Part> parts);

  std::size_t count() const { return count_; }
  // Copies the arrays to out[0], ..., out[count() - 1].
  void gather(float* out) const;
  // Copies such a vector into the arrays.
  void scatter(const float* vector) const;
  // Adds average - handed_in to arrays that have been trained on since they were handed in: in double, rounded once. A
  // bounded value stays between its old value and `average`, so that a variance does not become negative.
  void correct(const float* average, const float* handed_in) const;

 private:
  std::vector<Part> parts_;
  std::size_t count_ = 0;
};

}  // namespace pearl
