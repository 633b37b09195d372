// What the machine can do, measured: for device discovery.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pearl {

// Bytes read and written per second by one thread copying `nbytes`, in GB/s; the best of `repeats`.
double copy_bandwidth_gbps(std::size_t nbytes, int repeats);
// Nanoseconds per dependent load at random places of `nbytes`.
double random_access_ns(std::size_t nbytes, std::size_t steps);
// Instruction sets beyond the baseline.
std::vector<std::string> cpu_features();

}  // namespace pearl
