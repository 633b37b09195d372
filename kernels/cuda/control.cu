// A wrong kernel, which compute-sanitizer must find: the control of `make gpu-check`.
#include "pearl/device/group.hpp"

PEARL_KERNEL pearl_write_out_of_bounds(int* x, int items) { x[items + static_cast<int>(threadIdx.x)] = 1; }
