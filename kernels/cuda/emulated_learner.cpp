// The Learner's kernels for the emulator; CMake compiles this file once for each PEARL_RULE.
#include "emulator.hpp"

#include "learner.cu"

namespace {

using pearl::emulator::call;

const std::string options = "-DPEARL_SLICED=" + std::to_string(PEARL_SLICED) + " -DPEARL_RULE=" + std::to_string(PEARL_RULE);
const pearl::emulator::Registered registered{{
    {"learner", options, "pearl_move_temperature", &call<pearl_move_temperature>},
    {"learner", options, "pearl_move_weights", &call<pearl_move_weights>},
#if PEARL_HAS_TAPE
    {"learner", options, "pearl_gradients", &call<pearl_gradients>},
    {"learner", options, "pearl_run_tape", &call<pearl_run_tape>},
#endif
}};

}  // namespace
