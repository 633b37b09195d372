#include <sycl/sycl.hpp>

#include "pearl/device/learner_entries.hpp"
