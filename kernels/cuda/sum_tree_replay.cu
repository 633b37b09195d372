#include "pearl/device/sum_tree_replay_entries.hpp"

// Kernels wait for memory more than for anything else. So what does not depend on each other is loaded together, before
// the first branch.

// Draws a batch by many blocks, an item for each team: the teams of one block would have to draw many in turn. The weights,
// which need the least leaf of all, follow in another launch. `draw` may be null: then it is number `own_call`.
PEARL_KERNEL pearl_draw(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                        std::uint64_t stratum, const Draw* draw, std::uint64_t own_call, const std::int32_t* failure) {
  const Place place = place_here();
  const bool failed = has_failed(failure);
  const std::uint64_t call = draw != nullptr ? draw->call : own_call;
  const SampledBatch arrays = *batch;
  const Mass mass(*replay);
  if (failed) return;
  const std::uint64_t i = place.group * (place.lanes / kTeam) + place.lane / kTeam;
  const bool real = i < count;
  draw_item(*replay, place, arrays, mass, stratum, call, real ? i : count - 1, real);
}

// Weighs the batch, and gathers its rows: the blocks take turns at the columns, and the last of a turn weighs. `draw` may
// be null: then beta is `own_beta_q28`.
PEARL_KERNEL pearl_weigh_rows(const SampledBatch* batch, std::uint64_t count, const Draw* draw,
                              std::int64_t own_beta_q28, const RowCopy* columns, std::uint32_t column_count,
                              const std::int32_t* failure) {
  const Place place = place_here();
  const bool failed = has_failed(failure);
  const std::int64_t beta_q28 = draw != nullptr ? draw->beta_q28 : own_beta_q28;
  const SampledBatch arrays = *batch;
  if (failed) return;
  const auto turn = static_cast<std::uint32_t>(place.group) % (column_count + 1);
  const auto group = static_cast<std::uint32_t>(place.group) / (column_count + 1);
  const auto groups = static_cast<std::uint32_t>(place.groups) / (column_count + 1);
  if (turn < column_count) {
    copy_rows(columns + turn, 1, {arrays.indices, 0, count, count}, {place.lane, place.lanes, group, groups});
    return;
  }
  std::uint32_t smallest = pearl::kLeafMax;
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const std::uint32_t leaf = arrays.leaves[i];
    smallest = leaf < smallest ? leaf : smallest;
  }
  weigh(arrays, count, least(place, smallest), beta_q28, group * place.lanes + place.lane, groups * place.lanes);
}

namespace pearl::device {

// One item of an update.
struct UpdateItem {
  std::uint64_t slot;
  std::uint32_t bits;  // of the priority
  std::uint32_t generation;
  bool real, wrong, fresh;
};

PEARL_DEVICE UpdateItem item_of(const std::int64_t* indices, const std::uint32_t* priorities,
                                const std::uint32_t* generations, std::uint64_t i, std::uint64_t count) {
  const std::uint64_t at = i < count ? i : count - 1;
  return {static_cast<std::uint64_t>(indices[at]), priorities[at], generations != nullptr ? generations[at] : 0,
          i < count, false, false};
}

// Looks whether the item may be applied. `held` is its slot, or slot 0 if it has none.
PEARL_DEVICE void check_item(const ReplayMemory& replay, const ReplaySlot& held, bool by_generation, UpdateItem& item) {
  const bool valued = item.bits <= kInfinityBits || item.bits == kClaim;  // minus zero is zero
  item.wrong = item.real && !(valued && item.slot < replay.capacity && held.generation != 0);
  item.fresh = item.real && !item.wrong && (!by_generation || item.generation == held.generation);
}

PEARL_DEVICE std::uint64_t slot_to_load(const ReplayMemory& replay, const UpdateItem& item) {
  return item.slot < replay.capacity ? item.slot : 0;
}

// Counts a checked item, and claims its slot: the last of duplicates has the highest claim.
PEARL_DEVICE void claim(const ReplayMemory& replay, const UpdateItem& item, std::uint64_t i, Updated& updated) {
  if (item.wrong) updated.highest = kNowhere;
  if (!item.fresh) return;
  const std::uint32_t priority = raised(replay, item.bits);
  updated.applied_infinite += std::uint64_t{1} << 32 | (priority == kInfinityBits);
  if (priority < kInfinityBits && priority > updated.highest) updated.highest = priority;
  Atomic<std::uint32_t>(replay.slots[item.slot].claim).fetch_max(static_cast<std::uint32_t>(i + 1));
}

// How leaves have changed.
struct Change {
  std::uint64_t total, large;
};

// Writes an item that still has its claim, and adds the change of its leaf to all sums above but the total. `before` is
// the leaf.
PEARL_DEVICE void apply(const ReplayMemory& replay, const UpdateItem& item, std::uint32_t before, std::int32_t scale,
                        Change& change) {
  const std::uint32_t priority = raised(replay, item.bits), leaf = leaf_of(replay, priority, scale);
  // Threads with another item of this slot may be looking at it.
  Atomic<std::uint32_t>(replay.leaves[item.slot]).store(leaf);
  Atomic<std::uint32_t>(replay.slots[item.slot].priority).store(priority);
  Atomic<std::uint32_t>(replay.slots[item.slot].claim).store(0);
  const std::uint64_t difference = std::uint64_t{leaf} - before;  // modulo 2^64, as all sums
  change.total += difference;
  change.large += std::uint64_t{large(leaf)} - large(before);
  if (difference == 0) return;
  for (unsigned level = 0; level + 1 < replay.levels; ++level) {
    std::uint64_t& sum = replay.sums[replay.offsets[level] + (item.slot >> replay.shift * (level + 1))];
    Atomic<std::uint64_t>(sum).fetch_add(difference);
  }
}

}  // namespace pearl::device

// As update(), by one block. Changes of leaves are added to the sums above them, all levels at once: they are integers, so
// that the order does not matter. A thread keeps its first items in registers.
PEARL_KERNEL pearl_update(const ReplayMemory* memory, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, UpdateRefusal* refusal,
                          const std::int32_t* failure) {
  constexpr unsigned kKept = 2;
  const Place place = place_here();
  const ReplayMemory& replay = *memory;
  const bool failed = has_failed(failure), by_generation = generations != nullptr;
  UpdateItem kept[kKept];
#pragma unroll
  for (unsigned u = 0; u < kKept; ++u)
    kept[u] = item_of(indices, priorities, generations, u * place.lanes + place.lane, count);
  if (failed) return;
  ReplaySlot held[kKept];
#pragma unroll
  for (unsigned u = 0; u < kKept; ++u) held[u] = glance(replay.slots[slot_to_load(replay, kept[u])]);
  Updated updated{};
#pragma unroll
  for (unsigned u = 0; u < kKept; ++u) {
    check_item(replay, held[u], by_generation, kept[u]);
    claim(replay, kept[u], u * place.lanes + place.lane, updated);
  }
  const auto checked = [&](std::uint64_t i) {
    UpdateItem item = item_of(indices, priorities, generations, i, count);
    check_item(replay, glance(replay.slots[slot_to_load(replay, item)]), by_generation, item);
    return item;
  };
  const std::uint64_t rest = kKept * place.lanes + place.lane;
  for (std::uint64_t i = rest; i < count; i += place.lanes) claim(replay, checked(i), i, updated);
  updated.highest = largest(place, updated.highest);
  if (updated.highest == kNowhere) {
    for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
      const auto slot = static_cast<std::uint64_t>(indices[i]);
      if (slot < replay.capacity) Atomic<std::uint32_t>(replay.slots[slot].claim).store(0);
    }
    return refuse(replay, place, indices, priorities, count, *refusal);
  }
  updated.applied_infinite = sum(place, updated.applied_infinite);
  const std::int32_t scale = fit_scale(replay, place, updated.highest);
  Change change{};
  const auto has_claim = [&](const UpdateItem& item, std::uint64_t i) {
    return item.fresh && Atomic<std::uint32_t>(replay.slots[item.slot].claim).load() == static_cast<std::uint32_t>(i + 1);
  };
  bool wins[kKept];
  std::uint32_t before[kKept];
#pragma unroll
  for (unsigned u = 0; u < kKept; ++u) {
    wins[u] = has_claim(kept[u], u * place.lanes + place.lane);
    before[u] = Atomic<std::uint32_t>(replay.leaves[slot_to_load(replay, kept[u])]).load();
  }
#pragma unroll
  for (unsigned u = 0; u < kKept; ++u)
    if (wins[u]) apply(replay, kept[u], before[u], scale, change);
  for (std::uint64_t i = rest; i < count; i += place.lanes) {
    const UpdateItem item = checked(i);
    if (has_claim(item, i)) apply(replay, item, Atomic<std::uint32_t>(replay.leaves[item.slot]).load(), scale, change);
  }
  change.total = sum(place, change.total);
  if (place.lane == 0) {
    *replay.total += change.total;
    note_update(*replay.progress, count, updated);
  }
  recover_scale(replay, place, scale, change.large);
}
