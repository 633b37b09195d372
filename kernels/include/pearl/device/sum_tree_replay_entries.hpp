// The Replay Manager's kernels, each run by one work-group. Devices draw and update in their own ways.
#pragma once

#include "pearl/device/replay_kernels.hpp"
#include "pearl/device/row_kernels.hpp"

using namespace pearl::device;

// Whether a step before this one has failed: then its batch must stay as it is. `failure` may be null.
PEARL_DEVICE bool has_failed(const std::int32_t* failure) { return failure != nullptr && *failure != 0; }

PEARL_KERNEL pearl_insert(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, std::uint32_t highest,
                          std::uint64_t infinite, std::uint64_t inserts) {
  insert(*replay, place_here(), indices, priorities, generations, count, highest, infinite, inserts);
}

PEARL_KERNEL pearl_retrieve(const ReplayMemory* replay, const std::int64_t* indices, std::uint32_t* priorities,
                            std::uint64_t count) {
  const Place place = place_here();
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const auto slot = static_cast<std::uint64_t>(indices[i]);
    const ReplaySlot held = replay->slots[slot];
    priorities[i] = replay->prioritized ? held.priority : (held.generation != 0 ? 0x3F800000u : 0u);  // 1 or 0
  }
}

PEARL_KERNEL pearl_sum_all(const ReplayMemory* replay) { sum_all(*replay, place_here()); }
