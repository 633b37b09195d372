// A network, as the device learners take it.
#pragma once

#include <cstddef>
#include <vector>

#include "pearl/learner/network.hpp"

namespace pearl::device {

struct NetworkSource {
  std::size_t inputs = 0;
  std::vector<learner::Op> ops;
};

}  // namespace pearl::device
