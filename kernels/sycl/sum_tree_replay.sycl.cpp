#include <sycl/sycl.hpp>

#include "pearl/device/sum_tree_replay_entries.hpp"

// Draws a batch and weighs it; also gathers its rows, where they are few enough for one work-group.
PEARL_KERNEL pearl_sample_rows(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                               std::uint64_t stratum, const Draw* draw, const RowCopy* columns,
                               std::uint32_t column_count, const std::int32_t* failure) {
  if (has_failed(failure)) return;
  const Place place = place_here();
  const Mass mass(*replay);
  std::uint32_t smallest = pearl::kLeafMax;
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const std::uint32_t leaf = draw_item(*replay, place, *batch, mass, stratum, draw->call, i, true);
    smallest = leaf < smallest ? leaf : smallest;
  }
  weigh(*batch, count, least(place, smallest), draw->beta_q28, place.lane, place.lanes);
  barrier(place);
  copy_rows(columns, column_count, {batch->indices, 0, count, count}, {place.lane, place.lanes, 0, 1});
}

PEARL_KERNEL pearl_update(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, UpdateRefusal* refusal,
                          std::uint64_t* applied, const std::int32_t* failure) {
  if (!has_failed(failure)) update(*replay, place_here(), indices, priorities, generations, count, *refusal, applied);
}
