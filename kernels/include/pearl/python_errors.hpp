// Errors of the kernels as Python's: for the modules that bind them.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "pearl/errors.hpp"

namespace pearl {

inline void raise_python(const char* name, const std::exception& error) {
  pybind11::object type = pybind11::module_::import("pearl.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

// For pybind11: raises the namesake in pearl.errors of what a kernel has thrown.
inline void translate_exception(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const ConfigurationError& error) {
    raise_python("ConfigurationError", error);
  } catch (const PriorityError& error) {
    raise_python("PriorityError", error);
  } catch (const ReplayError& error) {
    raise_python("ReplayError", error);
  } catch (const LearnerError& error) {
    raise_python("TrainerError", error);
  } catch (const DeviceError& error) {
    raise_python("DeviceError", error);
  } catch (const CheckpointError& error) {
    raise_python("CheckpointError", error);
  } catch (const QueueClosedError& error) {
    raise_python("QueueClosedError", error);
  } catch (const QueueTimeoutError& error) {
    raise_python("QueueTimeoutError", error);
  } catch (const QueueError& error) {
    raise_python("QueueError", error);
  } catch (const Error& error) {
    raise_python("PearlError", error);
  }
}

}  // namespace pearl
