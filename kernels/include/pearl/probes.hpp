// Measurements of the machine, for device discovery.
#pragma once

#include <cstddef>

namespace pearl {

// Bytes read and written per second by one thread copying `nbytes`, in GB/s; the best of `repeats`.
double copy_bandwidth_gbps(std::size_t nbytes, int repeats);
// Nanoseconds per dependent load at random places in `nbytes`.
double random_access_ns(std::size_t nbytes, std::size_t steps);

}  // namespace pearl
