// Generalized advantage estimation on a parallel device, of arrays in the host's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "pearl/device/queue.hpp"
#include "pearl/gae.hpp"

namespace pearl::device {

// Copies a call's arrays to memory that the device reaches, and the results back. A subclass scans them there. The
// memory is kept for later calls.
class GaeOnDevice {
 public:
  // The memory is pinned on the host, or `in_device_memory`, into which it is copied from there.
  GaeOnDevice(std::shared_ptr<DeviceQueue> queue, const GaeFactors& factors, bool in_device_memory);
  virtual ~GaeOnDevice() = default;

  // Thread-safe. Throws DeviceError where the device fails or its memory does not suffice.
  void estimate(const GaeCall& call);

 protected:
  // Scans a call whose arrays the device reaches, and waits.
  virtual void scan(const GaeCall& call) = 0;
  // Never frees the memory: a device that failed may still use it.
  void abandon_memory();

  const std::shared_ptr<DeviceQueue> queue_;
  const GaeFactors factors_;
  std::mutex mutex_;

 private:
  const bool in_device_memory_;
  DeviceArray<std::uint8_t> host_, device_;
};

// By the kernel of gae_entries.hpp.
class Gae final : public GaeOnDevice {
 public:
  Gae(std::shared_ptr<DeviceQueue> queue, double gamma, double gae_lambda);

 private:
  void scan(const GaeCall& call) override;

  const std::shared_ptr<const Kernels> kernels_;
};

}  // namespace pearl::device
