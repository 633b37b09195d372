// Shared by the bindings of the native learners: checks of their arrays, and what must keep them alive.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "pearl/errors.hpp"
#include "pearl/learner/optimizer.hpp"

namespace bindings {

using Floats = Array<float>;
using OptionalFloats = std::optional<Floats>;

inline std::string shape_of(const py::array& array) { return py::str(array.attr("shape")); }

// Checks for `rows` rows of `width` items each, of any shape.
inline void check_rows(const py::array& array, const char* name, std::size_t rows, std::size_t width) {
  if (array.ndim() < 1 || static_cast<std::size_t>(array.shape(0)) != rows ||
      static_cast<std::size_t>(array.size()) != rows * width)
    throw pearl::LearnerError(std::string(name) + " must hold " + std::to_string(rows) + " rows of " +
                              std::to_string(width) + " numbers; found shape " + shape_of(array) + ".");
}

inline void check_size(const py::array& array, const char* name, std::size_t size) {
  if (static_cast<std::size_t>(array.size()) != size)
    throw pearl::LearnerError(std::string(name) + " must hold " + std::to_string(size) + " numbers; found " +
                              std::to_string(array.size()) + ".");
}

inline std::size_t rows_of(const py::array& array) {
  return array.ndim() < 1 ? 0 : static_cast<std::size_t>(array.shape(0));
}

// An optimizer that keeps its arrays alive.
struct HeldOptimizer : pearl::learner::Optimizer {
  std::array<OptionalFloats, 4> held;
  std::size_t parameters = 0;

  float* hold(std::size_t which, const char* name, OptionalFloats array, std::size_t size) {
    if (array) check_size(*array, name, size);
    held[which] = std::move(array);
    return held[which] ? held[which]->mutable_data() : nullptr;
  }
};

// A learner or an algorithm that keeps the arrays and networks it works on alive.
template <class Base>
struct Held : Base {
  template <class... Parts>
  explicit Held(std::vector<py::object> objects, Parts&&... parts)
      : Base(std::forward<Parts>(parts)...), held(std::move(objects)) {}
  std::vector<py::object> held;
};

inline void check_parameters(const HeldOptimizer& optimizer, const char* name, std::size_t expected) {
  if (optimizer.parameters != expected)
    throw pearl::LearnerError(std::string("The ") + name + "'s optimizer must hold " + std::to_string(expected) +
                              " parameters; found " + std::to_string(optimizer.parameters) + ".");
}

}  // namespace bindings
