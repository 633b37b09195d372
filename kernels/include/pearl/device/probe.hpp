// Overheads of a device: launches and copies.
#pragma once

#include <cstddef>
#include <vector>

#include "pearl/device/queue.hpp"

namespace pearl::device {

// Microseconds of `repeats` runs of `launches` empty kernels, recorded where the device does so, followed by one wait.
std::vector<double> launch_times_us(DeviceQueue& queue, std::size_t launches, std::size_t repeats);
// Microseconds of `repeats` copies of `bytes` within the device's memory, each waited for.
std::vector<double> memory_times_us(DeviceQueue& queue, std::size_t bytes, std::size_t repeats);
// Microseconds of `repeats` copies of `bytes` between host and device memory, `to_device` or back, each waited for; the
// host's is `pinned`, or pageable.
std::vector<double> copy_times_us(DeviceQueue& queue, std::size_t bytes, bool to_device, std::size_t repeats,
                                  bool pinned);

}  // namespace pearl::device
