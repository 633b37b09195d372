// Python bindings for averages between Learners: gathering and loading parameters, and their mean.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "pearl/parameter_average.hpp"

namespace {

using namespace bindings;

// The numbers of a contiguous float32 array of `count`.
const float* vector_data(const py::handle& object, std::size_t count, const char* name) {
  const auto* array = array_of<float>(object.ptr());
  if (array == nullptr || py::reinterpret_borrow<py::array>(object).size() != static_cast<py::ssize_t>(count))
    throw pearl::LearnerError(std::string(name) + " must be contiguous float32 of " + std::to_string(count) +
                              " numbers.");
  return reinterpret_cast<const float*>(array->data);
}

float* writable_data(const py::handle& object, std::size_t count, const char* name) {
  const float* data = vector_data(object, count, name);
  if (!py::reinterpret_borrow<py::array>(object).writeable())
    throw pearl::LearnerError(std::string(name) + " must be writable.");
  return const_cast<float*>(data);
}

// The arrays with their owners.
struct HeldArrays {
  HeldArrays(std::vector<py::array> given, const std::vector<bool>& bounded)
      : owners(std::move(given)), arrays(parts(owners, bounded)) {}

  static std::vector<pearl::ParameterArrays::Part> parts(const std::vector<py::array>& owners,
                                                         const std::vector<bool>& bounded) {
    if (owners.size() != bounded.size())
      throw pearl::LearnerError("Each array needs one word on whether it is bounded.");
    std::vector<pearl::ParameterArrays::Part> found;
    for (std::size_t i = 0; i < owners.size(); ++i) {
      const auto count = static_cast<std::size_t>(owners[i].size());
      found.push_back({writable_data(owners[i], count, "A parameter"), count, bounded[i]});
    }
    return found;
  }

  std::vector<py::array> owners;
  pearl::ParameterArrays arrays;
};

// The numbers of arrays of one size.
std::vector<const float*> vectors_data(const std::vector<py::array>& vectors, std::size_t count) {
  std::vector<const float*> found;
  for (const py::array& vector : vectors) found.push_back(vector_data(vector, count, "A Learner's parameters"));
  return found;
}

}  // namespace

void bind_averaging(py::module_& m) {
  py::class_<HeldArrays>(m, "ParameterArrays")
      .def(py::init<std::vector<py::array>, std::vector<bool>>(), py::arg("arrays"), py::arg("bounded"))
      .def_property_readonly("count", [](const HeldArrays& held) { return held.arrays.count(); })
      .def(
          "gather",
          [](const HeldArrays& held, const py::array& out) {
            float* to = writable_data(out, held.arrays.count(), "The vector");
            const Released released;
            held.arrays.gather(to);
          },
          py::arg("out"))
      .def(
          "scatter",
          [](const HeldArrays& held, const py::array& vector) {
            const float* from = vector_data(vector, held.arrays.count(), "The vector");
            const Released released;
            held.arrays.scatter(from);
          },
          py::arg("vector"))
      .def(
          "correct",
          [](const HeldArrays& held, const py::array& average, const py::array& handed_in) {
            const float* mean = vector_data(average, held.arrays.count(), "The average");
            const float* own = vector_data(handed_in, held.arrays.count(), "What was handed in");
            const Released released;
            held.arrays.correct(mean, own);
          },
          py::arg("average"), py::arg("handed_in"));
  m.def(
      "mean_of",
      [](const std::vector<py::array>& vectors, const py::array& out) {
        const auto count = static_cast<std::size_t>(out.size());
        const std::vector<const float*> from = vectors_data(vectors, count);
        float* to = writable_data(out, count, "The mean");
        const Released released;
        pearl::mean_of(from, count, to);
      },
      py::arg("vectors"), py::arg("out"));
  m.def(
      "write_mean",
      [](OnBuffer<pearl::Snapshot>& snapshot, const py::buffer& head, const std::vector<py::array>& vectors) {
        const py::buffer_info begin = whole_buffer(head, "The head of an average", false);
        const auto count = vectors.empty() ? 0 : static_cast<std::size_t>(vectors[0].size());
        const std::vector<const float*> from = vectors_data(vectors, count);
        const Released released;
        return pearl::write_mean(snapshot, begin.ptr, static_cast<std::size_t>(begin.size * begin.itemsize), from,
                                 count);
      },
      py::arg("snapshot"), py::arg("head"), py::arg("vectors"));
}
