#include "pearl/device/sycl.hpp"

#include "pearl/device/sum_tree_replay_entries.hpp"

// Draws a batch and weighs it; also gathers its rows, where they are few enough for one work-group. `draw` may be null: then
// it is number `own_call`, weighed by `own_beta_q28`.
PEARL_KERNEL pearl_sample_rows(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                               std::uint64_t stratum, const Draw* draw, std::uint64_t own_call,
                               std::int64_t own_beta_q28, const RowCopy* columns, std::uint32_t column_count,
                               const std::int32_t* failure) {
  if (has_failed(failure)) return;
  const Draw own{own_call, own_beta_q28}, drawn = draw != nullptr ? *draw : own;
  const Place place = place_here();
  const Mass mass(*replay);
  std::uint32_t smallest = pearl::kLeafMax;
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const std::uint32_t leaf = draw_item(*replay, place, *batch, mass, stratum, drawn.call, i, true);
    smallest = leaf < smallest ? leaf : smallest;
  }
  weigh(*batch, count, least(place, smallest), drawn.beta_q28, place.lane, place.lanes);
  barrier(place);
  copy_rows(columns, column_count, {batch->indices, 0, count, count}, {place.lane, place.lanes, 0, 1});
}

PEARL_KERNEL pearl_update(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, UpdateRefusal* refusal,
                          const std::int32_t* failure) {
  if (!has_failed(failure)) update(*replay, place_here(), indices, priorities, generations, count, *refusal);
}
