#include <sycl/sycl.hpp>

#include "pearl/device/sum_tree_replay_entries.hpp"
