#include "pearl/device/sycl.hpp"

#include "pearl/device/learner_entries.hpp"
