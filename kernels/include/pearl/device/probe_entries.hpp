// Measures a launch, and tests whether kernels compile and run at all.
#pragma once

#include "pearl/device/group.hpp"

// x[i] += 1
PEARL_KERNEL pearl_increment(unsigned* x) {
  const pearl::device::Place place = pearl::device::place_here();
  x[place.group * place.lanes + place.lane] += 1;
}
