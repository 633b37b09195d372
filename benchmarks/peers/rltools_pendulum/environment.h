// rltools' own Pendulum in C++, as the environment of a loop that its Python package compiles.
#pragma once
#include <rl_tools/rl/environments/pendulum/operations_generic.h>

namespace RL_TOOLS_MODULE_NAME {
template <typename T, typename TI>
using ENVIRONMENT_FACTORY =
    rl_tools::rl::environments::Pendulum<rl_tools::rl::environments::pendulum::Specification<T, TI>>;
}
