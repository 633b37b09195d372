// The kernels of the Replay Manager, the Data Storage and advantages for the emulator, and the probe's.
#include "emulator.hpp"

#include "column_store.cu"
#include "gae.cu"
#include "probe.cu"
#include "sum_tree_replay.cu"

namespace {

using pearl::emulator::call;

const pearl::emulator::Registered registered{{
    {"column_store", "", "pearl_copy_rows", &call<pearl_copy_rows>},
    {"gae", "", "pearl_gae", &call<pearl_gae>},
    {"probe", "", "pearl_increment", &call<pearl_increment>},
    {"sum_tree_replay", "", "pearl_draw", &call<pearl_draw>},
    {"sum_tree_replay", "", "pearl_insert", &call<pearl_insert>},
    {"sum_tree_replay", "", "pearl_retrieve", &call<pearl_retrieve>},
    {"sum_tree_replay", "", "pearl_sum_all", &call<pearl_sum_all>},
    {"sum_tree_replay", "", "pearl_update", &call<pearl_update>},
    {"sum_tree_replay", "", "pearl_weigh_rows", &call<pearl_weigh_rows>},
}};

}  // namespace
