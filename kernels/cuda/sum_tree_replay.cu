#include "pearl/device/sum_tree_replay_entries.hpp"

// Draws a batch by many blocks, an item for each team: the teams of one block would have to draw many in turn. The weights,
// which need the least leaf of all, follow in another launch.
PEARL_KERNEL pearl_draw(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count, Draw* draw,
                        const std::int32_t* failure) {
  if (has_failed(failure)) return;
  const Place place = place_here();
  const std::uint64_t i = place.group * (place.lanes / kTeam) + place.lane / kTeam;
  const bool real = i < count;
  const std::uint32_t leaf =
      draw_item(*replay, place, *batch, Mass(*replay, count), draw->call, real ? i : count - 1, real);
  const std::uint32_t smallest = least(place, real ? leaf : pearl::kLeafMax);
  if (place.lane == 0) Atomic<std::uint32_t>(draw->least).fetch_min(smallest);
}

// Weighs the batch, and gathers its rows.
PEARL_KERNEL pearl_weigh_rows(const SampledBatch* batch, std::uint64_t count, const Draw* draw, const RowCopy* columns,
                              std::uint32_t column_count, const std::int32_t* failure) {
  if (has_failed(failure)) return;
  const Place place = place_here();
  const std::uint64_t here = place.group * place.lanes + place.lane, all = place.groups * place.lanes;
  weigh(*batch, count, draw->least, draw->beta_q28, here, all);
  copy_rows(columns, column_count, {batch->indices, 0, count, count}, {place.lane, place.lanes, place.group, place.groups});
}
