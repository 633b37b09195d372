// The methods of every class that estimates advantages, as pearl/rollout/gae.py defines them. Python calls them directly:
// pybind's dispatch would take as long as a small rollout's scan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "pearl/errors.hpp"
#include "pearl/gae.hpp"
#include "pearl/python_arrays.hpp"

namespace bindings {

template <std::size_t count>
using Names = std::array<const char*, count>;
template <std::size_t count>
using Given = std::array<PyObject*, count>;

inline constexpr Names<4> kEstimateNames = {"rewards", "values", "last_values", "ends"};
inline constexpr Names<7> kCodesNames = {"rewards", "values", "bonus", "last_values", "ends", "advantages", "returns"};

// The arguments of a call in the order of their names; any may be given by keyword.
template <std::size_t count>
Given<count> arguments_of(const Names<count>& names, PyObject* const* given, Py_ssize_t positional,
                          PyObject* keywords) {
  Given<count> found{};
  if (positional > static_cast<Py_ssize_t>(count))
    throw py::type_error("expected " + std::to_string(count) + " arguments; found " + std::to_string(positional) + ".");
  for (Py_ssize_t i = 0; i < positional; ++i) found[static_cast<std::size_t>(i)] = given[i];
  for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i) {
    PyObject* const keyword = PyTuple_GET_ITEM(keywords, i);
    std::size_t at = 0;
    while (at < count && PyUnicode_CompareWithASCIIString(keyword, names[at]) != 0) ++at;
    if (at == count || found[at] != nullptr)
      throw py::type_error("unknown or repeated argument '" + std::string(py::str(keyword)) + "'.");
    found[at] = given[positional + i];
  }
  for (std::size_t i = 0; i < count; ++i)
    if (found[i] == nullptr) throw py::type_error("missing argument '" + std::string(names[i]) + "'.");
  return found;
}

// The data of an array of this shape; null unless it is one, contiguous and aligned, and writeable if it is `written`.
template <class T>
T* data_of(PyObject* object, std::initializer_list<py::ssize_t> shape, bool written = false) {
  using Api = py::detail::npy_api;
  const auto* array = array_of<T>(object);
  const int needed = Api::NPY_ARRAY_ALIGNED_ | (written ? Api::NPY_ARRAY_WRITEABLE_ : 0);
  if (array == nullptr || array->nd != static_cast<int>(shape.size()) || (array->flags & needed) != needed)
    return nullptr;
  const auto* size = array->dimensions;
  for (const py::ssize_t wanted : shape)
    if (*size++ != wanted) return nullptr;
  return reinterpret_cast<T*>(array->data);
}

// Sizes, and what both forms of a call have. False for arrays that do not fit.
template <class T>
bool read_shape(pearl::GaeCall& call, PyObject* rewards) {
  const auto* array = array_of<T>(rewards);
  if (array == nullptr || array->nd != 2) return false;
  call.horizon = static_cast<std::size_t>(array->dimensions[0]);
  call.envs = static_cast<std::size_t>(array->dimensions[1]);
  call.number_bytes = sizeof(T);
  return true;
}

inline bool read_rest(pearl::GaeCall& call, PyObject* last_values, PyObject* ends, PyObject* advantages,
                      PyObject* returns) {
  const auto horizon = static_cast<py::ssize_t>(call.horizon), envs = static_cast<py::ssize_t>(call.envs);
  call.last_values = data_of<float>(last_values, {envs});
  call.ends = data_of<std::uint8_t>(ends, {horizon, envs});
  call.advantages = data_of<float>(advantages, {horizon, envs}, true);
  call.returns = data_of<float>(returns, {horizon, envs}, true);
  if (!call.last_values || !call.ends || !call.advantages || !call.returns) return false;
  const std::less_equal<const float*> before;  // of any two pointers
  return before(call.advantages + call.count(), call.returns) || before(call.returns + call.count(), call.advantages);
}

inline std::optional<pearl::GaeCall> call_of(const Given<4>& given) {
  pearl::GaeCall call{};
  if (!read_shape<float>(call, given[0]) || !read_rest(call, given[2], given[3], given[0], given[1])) return {};
  call.rewards.data = call.advantages;
  call.values.data = call.returns;
  return call;
}

// The attributes of pearl.rollout.Codes.
struct CodesOf {
  explicit CodesOf(PyObject* object)
      : codes(object_of(object, names().codes)),
        offset(number_of(object, names().offset)),
        scale(number_of(object, names().scale)) {}
  template <class T>
  pearl::GaeNumbers numbers(const pearl::GaeCall& call) const {
    return {data_of<T>(codes.ptr(), {static_cast<py::ssize_t>(call.horizon), static_cast<py::ssize_t>(call.envs)}),
            offset, scale};
  }

  py::object codes;
  float offset, scale;

 private:
  struct Interned {
    PyObject* codes = PyUnicode_InternFromString("codes");
    PyObject* offset = PyUnicode_InternFromString("offset");
    PyObject* scale = PyUnicode_InternFromString("scale");
  };
  static const Interned& names() {
    static const Interned names;
    return names;
  }
  static py::object object_of(PyObject* object, PyObject* name) {
    PyObject* const found = PyObject_GetAttr(object, name);
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  }
  static float number_of(PyObject* object, PyObject* name) {
    const double number = PyFloat_AsDouble(object_of(object, name).ptr());
    if (number == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return static_cast<float>(number);
  }
};

inline std::optional<pearl::GaeCall> call_of(const Given<7>& given, const CodesOf& rewards, const CodesOf& values) {
  pearl::GaeCall call{};
  const bool narrow = read_shape<std::uint8_t>(call, rewards.codes.ptr());
  if (!narrow && !read_shape<std::uint16_t>(call, rewards.codes.ptr())) return {};
  if (!read_rest(call, given[3], given[4], given[5], given[6])) return {};
  call.rewards = narrow ? rewards.numbers<std::uint8_t>(call) : rewards.numbers<std::uint16_t>(call);
  call.values = narrow ? values.numbers<std::uint8_t>(call) : values.numbers<std::uint16_t>(call);
  if (call.rewards.data == nullptr || call.values.data == nullptr) return {};
  if (given[2] != Py_None) {
    const auto horizon = static_cast<py::ssize_t>(call.horizon), envs = static_cast<py::ssize_t>(call.envs);
    call.bonus = data_of<float>(given[2], {horizon, envs});
    if (call.bonus == nullptr) return {};
  }
  return call;
}

// Raises the error of the check in Python, which says what was expected and what was found.
template <std::size_t count>
[[noreturn]] void refuse(const char* check, const Given<count>& given) {
  py::tuple arguments(count);
  for (std::size_t i = 0; i < count; ++i) arguments[i] = py::reinterpret_borrow<py::object>(given[i]);
  py::module_::import("pearl.rollout.gae").attr(check)(*arguments);
  throw pearl::ConfigurationError("The arrays of the rollout do not fit together.");
}

// `Estimator::estimate(call)` without the GIL where there are at least `released_from` numbers: releasing it takes as
// long as scanning hundreds.
template <class Estimator, std::size_t released_from>
struct GaeMethods {
  static PyObject* estimate(PyObject* self, PyObject* const* arguments, Py_ssize_t positional, PyObject* keywords) {
    return guarded([&] {
      const Given<4> given = arguments_of(kEstimateNames, arguments, positional, keywords);
      const auto call = call_of(given);
      if (!call) refuse("check_arrays", given);
      run(self, *call);
    });
  }

  static PyObject* estimate_codes(PyObject* self, PyObject* const* arguments, Py_ssize_t positional,
                                  PyObject* keywords) {
    return guarded([&] {
      const Given<7> given = arguments_of(kCodesNames, arguments, positional, keywords);
      const CodesOf rewards(given[0]), values(given[1]);
      const auto call = call_of(given, rewards, values);
      if (!call) refuse("check_codes", given);
      run(self, *call);
    });
  }

 private:
  static void run(PyObject* self, const pearl::GaeCall& call) {
    const auto* instance = reinterpret_cast<py::detail::instance*>(self);
    auto* estimator = instance->simple_layout ? static_cast<Estimator*>(instance->simple_value_holder[0]) : nullptr;
    if (estimator == nullptr) throw py::type_error("This needs an estimator that has been constructed.");
    if (call.count() < released_from) return estimator->estimate(call);
    const Released released;
    estimator->estimate(call);
  }

  template <class Work>
  static PyObject* guarded(Work work) {
    try {
      work();
      Py_RETURN_NONE;
    } catch (...) {
      py::detail::try_translate_exceptions();
      return nullptr;
    }
  }
};

// Adds `estimate` and `estimate_codes`.
template <class Estimator, std::size_t released_from, class... Options>
void bind_gae_methods(py::class_<Estimator, Options...>& cls) {
  using Methods = GaeMethods<Estimator, released_from>;
  const auto add = [&](PyMethodDef& method) {
    cls.attr(method.ml_name) = py::reinterpret_steal<py::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls.ptr()), &method));
  };
  const auto function = [](auto pointer) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pointer)); };
  static PyMethodDef estimate = {"estimate", function(&Methods::estimate), METH_FASTCALL | METH_KEYWORDS,
                                 "As pearl.rollout.AdvantageEstimator."};
  static PyMethodDef estimate_codes = {"estimate_codes", function(&Methods::estimate_codes),
                                       METH_FASTCALL | METH_KEYWORDS, "As pearl.rollout.AdvantageEstimator."};
  add(estimate);
  add(estimate_codes);
}

}  // namespace bindings
