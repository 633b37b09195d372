#include "pearl/device/sycl.hpp"

// Every rounding is that of the CPU's kernels.
#pragma clang fp contract(off)

#include "pearl/device/gae_entries.hpp"
