// For all bindings: new arrays, and checks of arrays from Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <optional>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/python_threads.hpp"

namespace py = pybind11;

namespace bindings {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// A new array, not initialised. Takes half the time of pybind's constructors, which matters for small batches.
inline py::array new_array(const py::dtype& dtype, int dimensions, const py::ssize_t* shape) {
  const auto& api = py::detail::npy_api::get();
  PyObject* made = api.PyArray_NewFromDescr_(api.PyArray_Type_, dtype.inc_ref().ptr(), dimensions,
                                             reinterpret_cast<const Py_intptr_t*>(shape), nullptr, nullptr, 0, nullptr);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::array>(made);
}

template <class T>
Array<T> new_vector(py::ssize_t count) {
  return py::reinterpret_steal<Array<T>>(new_array(py::dtype::of<T>(), 1, &count).release());
}

// A contiguous array of T, or null. The common case needs one comparison.
template <class T>
const py::detail::PyArray_Proxy* array_of(PyObject* object) {
  static const PyObject* const usual = py::dtype::of<T>().release().ptr();
  const auto& api = py::detail::npy_api::get();
  if (!PyObject_TypeCheck(object, api.PyArray_Type_)) return nullptr;
  const auto* array = py::detail::array_proxy(object);
  if (array->descr == usual && (array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0) return array;
  return py::isinstance<Array<T>>(object) ? array : nullptr;
}

// Whether the items are Python objects, which must not be copied as bytes.
inline bool holds_objects(const py::array& array) { return array.dtype().attr("hasobject").cast<bool>(); }

// The memory of a contiguous buffer; with gaps it would be read and written past its end.
inline py::buffer_info whole_buffer(const py::buffer& buffer, const char* name, bool writable) {
  py::buffer_info info = buffer.request(writable);
  py::ssize_t step = info.itemsize;
  for (py::ssize_t i = info.ndim - 1; i >= 0 && info.size > 0; --i) {
    const auto d = static_cast<std::size_t>(i);
    if (info.shape[d] != 1 && info.strides[d] != step)
      throw pearl::Error(std::string(name) + " must be contiguous; found strides that leave gaps. Copy it first.");
    step *= info.shape[d];
  }
  return info;
}

inline std::size_t rows(const py::array& array, const char* name, py::ssize_t expected = -1) {
  if (array.ndim() != 1 || (expected >= 0 && array.size() != expected))
    throw pearl::ReplayError(std::string(name) + " must be a vector" +
                             (expected >= 0 ? " of " + std::to_string(expected) + " items" : std::string()) +
                             "; found " +
                             (array.ndim() == 1 ? std::to_string(array.size()) + " items"
                                                : "shape " + std::string(py::str(array.attr("shape")))) +
                             ".");
  return static_cast<std::size_t>(array.size());
}

inline std::size_t batch_rows(py::ssize_t count) {
  if (count < 1) throw pearl::ReplayError("batch_size must be at least 1; found " + std::to_string(count) + ".");
  return static_cast<std::size_t>(count);
}

// The data of an optional array of `count` items; null for None.
template <class T>
const T* data_or_null(const std::optional<Array<T>>& array, const char* name, std::size_t count) {
  if (!array) return nullptr;
  rows(*array, name, static_cast<py::ssize_t>(count));
  return array->data();
}

}  // namespace bindings
