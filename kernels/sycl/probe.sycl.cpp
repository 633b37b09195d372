#include "pearl/device/sycl.hpp"

#include "pearl/device/probe_entries.hpp"
