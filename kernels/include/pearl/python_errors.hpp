// Errors of the kernels as Python's: for the modules that bind them.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "pearl/errors.hpp"

namespace pearl {

template <class Type>
bool is_a(const Error& error) {
  return dynamic_cast<const Type*>(&error) != nullptr;
}

// The name of the error's namesake in pearl.errors. Derived classes come before their bases.
inline const char* python_name(const Error& error) {
  if (is_a<ConfigurationError>(error)) return "ConfigurationError";
  if (is_a<PriorityError>(error)) return "PriorityError";
  if (is_a<ReplayError>(error)) return "ReplayError";
  if (is_a<LearnerError>(error)) return "TrainerError";
  if (is_a<DeviceError>(error)) return "DeviceError";
  if (is_a<CheckpointError>(error)) return "CheckpointError";
  if (is_a<QueueClosedError>(error)) return "QueueClosedError";
  if (is_a<QueueTimeoutError>(error)) return "QueueTimeoutError";
  if (is_a<QueueError>(error)) return "QueueError";
  return "PearlError";
}

// For pybind11: raises the namesake in pearl.errors of an error that a kernel has thrown.
inline void translate_exception(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const pybind11::object type = pybind11::module_::import("pearl.errors").attr(python_name(error));
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace pearl
