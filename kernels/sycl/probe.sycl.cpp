#include <sycl/sycl.hpp>

#include "pearl/device/probe_entries.hpp"
