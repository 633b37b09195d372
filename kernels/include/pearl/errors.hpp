// Exceptions of the kernels; the bindings translate each to its namesake in pearl.errors.
#pragma once

#include <stdexcept>

namespace pearl {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the user asked for, by an argument or the environment, cannot be done.
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

// A device that is gone or refuses, a kernel that does not compile or cannot run, device memory that is not there.
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
