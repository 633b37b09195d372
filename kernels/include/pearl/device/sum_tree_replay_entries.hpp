// The Replay Manager's kernels, each run by one work-group.
#pragma once

#include "pearl/device/replay_kernels.hpp"
#include "pearl/device/row_kernels.hpp"

using namespace pearl::device;

PEARL_KERNEL pearl_sample(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                          const Draw* draw) {
  sample(*replay, place_here(), *batch, count, *draw);
}

// Also gathers the drawn rows, where they are few enough for one work-group.
PEARL_KERNEL pearl_sample_rows(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                               const Draw* draw, const RowCopy* columns, std::uint32_t column_count) {
  const Place place = place_here();
  sample(*replay, place, *batch, count, *draw);
  barrier(place);
  copy_rows(columns, column_count, {batch->indices, 0, count, count}, {place.lane, place.lanes, 0, 1});
}

PEARL_KERNEL pearl_insert(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, std::uint32_t highest,
                          std::uint64_t infinite, std::uint64_t inserts) {
  const Place place = place_here();
  insert(*replay, place, indices, priorities, generations, count, highest, infinite, inserts);
  show(*replay, place);
}

PEARL_KERNEL pearl_update(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, UpdateRefusal* refusal) {
  const Place place = place_here();
  update(*replay, place, indices, priorities, generations, count, *refusal);
  show(*replay, place);
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

PEARL_KERNEL pearl_sum_all(const ReplayMemory* replay) {
  const Place place = place_here();
  sum_all(*replay, place);
  show(*replay, place);
}
