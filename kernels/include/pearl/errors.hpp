// Exceptions of the kernels; the bindings translate each to its namesake in pearl.errors.
#pragma once

#include <stdexcept>

namespace pearl {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An argument or an environment variable asks for something that is not possible.
struct ConfigurationError : Error {
  using Error::Error;
};

struct ReplayError : Error {
  using Error::Error;
};

struct PriorityError : ReplayError {
  using ReplayError::ReplayError;
};

struct LearnerError : Error {
  using Error::Error;
};

struct CheckpointError : Error {
  using Error::Error;
};

// A device is gone or refuses, a kernel does not compile or run, or device memory is exhausted.
struct DeviceError : Error {
  using Error::Error;
};

struct QueueError : Error {
  using Error::Error;
};

struct QueueClosedError : QueueError {
  using QueueError::QueueError;
};

struct QueueTimeoutError : QueueError {
  using QueueError::QueueError;
};

}  // namespace pearl
