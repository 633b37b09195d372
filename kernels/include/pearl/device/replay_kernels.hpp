// The Replay Manager on parallel devices: its memory, and one work-group's operations on it. Host code only sees the memory.
//
// One work-group handles a batch of any size: results that depend on the whole batch (its least leaf, whether it is
// valid, the next level of sums) need a barrier, not another launch. Only 32-bit atomics are used here: every device has them.
// Priorities are handled as bits of floats, so that none is flushed to zero.
#pragma once

#include <cstdint>

#include "pearl/device/team_kernels.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"

namespace pearl::device {

inline constexpr std::uint32_t kNowhere = ~0u;

// Kept by kernels.
struct ReplayProgress {
  std::uint64_t filled;
  std::uint64_t inserts;
  std::uint64_t updates;
  std::uint64_t stale;
  std::uint64_t saturated;
  std::uint64_t rescales;
  std::uint64_t recoveries;
  std::uint64_t looked_at;  // inserts and updates at the last search for a higher scale
  std::uint64_t large;      // the sum of large() of all leaves; valid while the scale is below the default
  std::int32_t scale;
  std::uint32_t max_priority;
};

// The positions of the first items that made an update fail, kNowhere for none.
struct UpdateRefusal {
  std::uint32_t index;     // out of range
  std::uint32_t priority;  // NaN or negative
  std::uint32_t slot;      // never written
};

// The data of a slot, together since a batch touches all of it.
struct alignas(16) ReplaySlot {
  std::uint32_t priority;
  std::uint32_t generation;  // 0: never written
  std::uint32_t times;       // sampled since written; counting stops at kTimesCounted, up to a batch later
  std::uint32_t claim;       // during an update by threads: 1 + the position of the last item for this slot; else 0
};

// A sum tree as in sum_tree.hpp, and the data of each slot. `sums` holds one level after another, the leaves' parents
// first; level i begins at `offsets[i]` and has `nodes[i]` nodes.
struct ReplayMemory {
  static constexpr unsigned kMostLevels = 36;

  std::uint64_t capacity;
  std::uint64_t seed;
  std::int64_t alpha_q28;
  std::uint32_t shift;   // log2 of the fanout
  std::uint32_t levels;  // of sums
  std::uint32_t prioritized;  // if not, there are no leaves, sums or priorities
  std::uint32_t initial;  // bits of the priority of items inserted without one; 0: the running maximum
  float epsilon;          // added to every priority of an update; 0: none
  std::uint32_t* leaves;
  std::uint64_t* sums;
  std::uint64_t* total;  // the last of the sums; 0 if there are none
  ReplaySlot* slots;
  const std::int64_t* written;  // slots in order; null if there are no gaps
  ReplayProgress* progress;
  std::uint64_t offsets[kMostLevels];
  std::uint64_t nodes[kMostLevels];
};

// One draw, worked out by the host before it is launched. Kernels read it from memory, so that a recorded launch serves
// for every draw.
struct Draw {
  std::uint64_t call;  // its number
  std::int64_t beta_q28;
};

// One sampled batch, each array of `count` items.
struct SampledBatch {
  std::int64_t* indices;
  float* weights;
  std::uint32_t* generations;
  std::uint32_t* leaves;
};

#ifdef PEARL_KERNELS

inline constexpr std::uint32_t kTimesCounted = (1u << 16) - 1;
inline constexpr std::uint32_t kClaim = 1u << 31;  // above every leaf

// The leaf at `target`, which lies below the total; found by the whole team.
PEARL_DEVICE std::uint64_t descend(const ReplayMemory& replay, const Place& place, std::uint64_t target) {
  const unsigned fanout = 1u << replay.shift;
  std::uint64_t node = 0;
  for (unsigned level = replay.levels - 1; level > 0; --level) {
    node <<= replay.shift;
    node += team_pick(place, replay.sums + replay.offsets[level - 1] + node, fanout, target);
  }
  node <<= replay.shift;
  return node + team_pick(place, replay.leaves + node, fanout, target);
}

// The items that a batch is drawn from.
struct Mass {
  std::uint64_t total;  // of the leaves; 0: all written slots alike
  std::uint64_t drawn;

  PEARL_DEVICE explicit Mass(const ReplayMemory& replay) : total(*replay.total) {
    const std::uint64_t filled = replay.progress->filled;
    drawn = total > 0 ? total : filled;
  }
};

// Draws item `i` of a batch in strata of a width, or 0 for none, by a team of lanes, and returns its leaf. Only a `real`
// item is stored and counted.
PEARL_DEVICE std::uint32_t draw_item(const ReplayMemory& replay, const Place& place, const SampledBatch& batch,
                                     const Mass& mass, std::uint64_t stratum, std::uint64_t call, std::uint64_t i,
                                     bool real) {
  const std::uint64_t target = mulhi64(uniform_at(replay.seed, call, i, stratum), mass.drawn);
  std::uint64_t slot = target;
  std::uint32_t leaf = 1;
  if (mass.total > 0) {
    slot = descend(replay, place, target);
    leaf = replay.leaves[slot];
  } else if (replay.written != nullptr) {
    slot = static_cast<std::uint64_t>(replay.written[target]);
  }
  const ReplaySlot held = glance(replay.slots[slot]);  // others may count a draw of it
  if (!real || place.lane % kTeam != 0) return leaf;
  batch.indices[i] = static_cast<std::int64_t>(slot);
  batch.leaves[i] = leaf;
  batch.generations[i] = held.generation;
  if (held.times < kTimesCounted) Atomic<std::uint32_t>(replay.slots[slot].times).fetch_add(1);
  return leaf;
}

// Importance weights; `least` is the batch's least leaf.
PEARL_DEVICE void weigh(const SampledBatch& batch, std::uint64_t count, std::uint32_t least, std::int64_t beta_q28,
                        std::uint64_t first, std::uint64_t step) {
  const std::int64_t log2_least = log2_q32(least);
  for (std::uint64_t i = first; i < count; i += step)
    batch.weights[i] = importance_weight(log2_least, log2_q32(batch.leaves[i]), beta_q28);
}

// Recomputes sums level by level: the ancestors of `count` leaves at `indices`, or the whole level if it has fewer nodes.
// Lanes that share a parent write the same value.
PEARL_DEVICE void sum_parents(const ReplayMemory& replay, const Place& place, const std::int64_t* indices,
                              std::uint64_t count) {
  const unsigned shift = replay.shift, fanout = 1u << shift;
  for (unsigned level = 0; level < replay.levels; ++level) {
    barrier(place);
    std::uint64_t* const sums = replay.sums + replay.offsets[level];
    const std::uint64_t* const below = level > 0 ? replay.sums + replay.offsets[level - 1] : nullptr;
    const bool all = replay.nodes[level] <= count;
    const auto parent = [&](std::uint64_t i) {
      return all ? i : static_cast<std::uint64_t>(indices[i]) >> shift * (level + 1);
    };
    const auto store = [&](std::uint64_t i, std::uint64_t sum) { write_alike(sums[parent(i)], sum); };
    const std::uint64_t parents = all ? replay.nodes[level] : count;
    if (level > 0)
      sum_families(place, parents, fanout, [&](std::uint64_t i) { return below + (parent(i) << shift); }, store);
    else
      sum_families(place, parents, fanout, [&](std::uint64_t i) { return replay.leaves + (parent(i) << shift); }, store);
  }
  barrier(place);
}

PEARL_DEVICE void sum_all(const ReplayMemory& replay, const Place& place) {
  sum_parents(replay, place, nullptr, replay.capacity);
}

PEARL_DEVICE std::uint32_t leaf_of(const ReplayMemory& replay, std::uint32_t priority, std::int32_t scale) {
  return quantise(std::bit_cast<float>(priority), replay.alpha_q28, scale);
}

PEARL_DEVICE std::uint32_t raised(const ReplayMemory& replay, std::uint32_t priority) {
  return std::bit_cast<std::uint32_t>(pearl::raised(std::bit_cast<float>(priority), replay.epsilon));
}

// Quantises every priority for another scale. Waits first until all lanes have read `progress`.
PEARL_DEVICE void set_scale(const ReplayMemory& replay, const Place& place, std::int32_t scale) {
  barrier(place);
  std::uint64_t found = 0;
  for (std::uint64_t slot = place.lane; slot < replay.capacity; slot += place.lanes) {
    const std::uint32_t leaf = leaf_of(replay, replay.slots[slot].priority, scale);
    replay.leaves[slot] = leaf;
    found += large(leaf);
  }
  found = sum(place, found);
  sum_all(replay, place);
  if (place.lane == 0) {
    replay.progress->scale = scale;
    replay.progress->large = found;
  }
  barrier(place);
}

// Lowers the scale if `priority`, finite, does not fit. Returns the scale.
PEARL_DEVICE std::int32_t fit_scale(const ReplayMemory& replay, const Place& place, std::uint32_t priority) {
  const std::int32_t scale = replay.progress->scale;
  if (priority == 0) return scale;
  const int excess = excess_bits(std::bit_cast<float>(priority), replay.alpha_q28, scale);
  if (excess == 0) return scale;
  if (place.lane == 0) replay.progress->rescales += 1;
  set_scale(replay, place, scale - excess);
  return scale - excess;
}

// Raises the scale again once the large priority that lowered it is gone, like pearl::SumTreeReplay; called after a batch
// is written and counted. `grown`: this lane's change of the sum of large().
PEARL_DEVICE void recover_scale(const ReplayMemory& replay, const Place& place, std::int32_t scale, std::uint64_t grown) {
  if (scale == kDefaultScale) return;
  ReplayProgress& progress = *replay.progress;
  grown = sum(place, grown);
  if (place.lane == 0) progress.large += grown;
  barrier(place);
  const std::uint64_t writes = progress.inserts + progress.updates;
  const bool looks = progress.large == 0 && writes - progress.looked_at >= progress.filled;
  barrier(place);  // all have read
  if (!looks) return;
  std::uint32_t highest = 0;
  for (std::uint64_t slot = place.lane; slot < replay.capacity; slot += place.lanes) {
    const std::uint32_t priority = replay.slots[slot].priority;
    if (priority < kInfinityBits && priority > highest) highest = priority;
  }
  const std::int32_t best = highest_scale(std::bit_cast<float>(largest(place, highest)), replay.alpha_q28);
  if (place.lane == 0) {
    progress.looked_at = writes;
    progress.recoveries += best > scale;
  }
  if (best > scale) set_scale(replay, place, best);
}

// New items at distinct `indices`; `priorities` may be null. `highest` is the largest finite priority, `inserts` the
// count of all insertions including these.
PEARL_DEVICE void insert(const ReplayMemory& replay, const Place& place, const std::int64_t* indices,
                   const std::uint32_t* priorities, const std::uint32_t* generations, std::uint64_t count,
                   std::uint32_t highest, std::uint64_t infinite, std::uint64_t inserts) {
  ReplayProgress& progress = *replay.progress;
  std::uint32_t initial = 0;
  std::int32_t scale = kDefaultScale;
  if (replay.prioritized) {
    initial = replay.initial != 0 ? replay.initial : progress.max_priority;
    scale = fit_scale(replay, place, priorities != nullptr ? highest : initial);
  }
  std::uint64_t added = 0, grown = 0;
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const auto slot = static_cast<std::uint64_t>(indices[i]);
    const std::uint32_t priority = priorities != nullptr ? priorities[i] : initial;
    added += replay.slots[slot].generation == 0;
    replay.slots[slot] = {priority, generations[i], 0, 0};
    if (!replay.prioritized) continue;
    const std::uint32_t leaf = leaf_of(replay, priority, scale);
    grown += std::uint64_t{large(leaf)} - large(replay.leaves[slot]);
    replay.leaves[slot] = leaf;
  }
  added = sum(place, added);
  if (replay.prioritized) sum_parents(replay, place, indices, count);
  if (place.lane == 0) {
    progress.filled += added;
    progress.inserts = inserts;
    if (replay.prioritized) {
      progress.saturated += infinite;
      if (priorities != nullptr && highest > progress.max_priority) progress.max_priority = highest;
    }
  }
  recover_scale(replay, place, scale, grown);
}

// Reports the first positions that made an update fail.
PEARL_DEVICE void refuse(const ReplayMemory& replay, const Place& place, const std::int64_t* indices,
                   const std::uint32_t* priorities, std::uint64_t count, UpdateRefusal& refusal) {
  std::uint32_t index = kNowhere, priority = kNowhere, slot = kNowhere;
  for (std::uint64_t at = place.lane; at < count; at += place.lanes) {
    const auto i = static_cast<std::uint32_t>(at);
    const auto place = static_cast<std::uint64_t>(indices[i]);
    if (place >= replay.capacity)
      index = i < index ? i : index;
    else if (replay.slots[place].generation == 0)
      slot = i < slot ? i : slot;
    if (priorities[i] > kInfinityBits && priorities[i] != kClaim) priority = i < priority ? i : priority;
  }
  index = least(place, index);
  priority = least(place, priority);
  slot = least(place, slot);
  if (place.lane != 0) return;
  if (index < refusal.index) refusal.index = index;
  if (priority < refusal.priority) refusal.priority = priority;
  if (slot < refusal.slot) refusal.slot = slot;
}

// The counts of an update.
struct Updated {
  std::uint32_t highest;           // finite priority
  std::uint64_t applied_infinite;  // upper half: items applied; lower half: how many of these are infinite
};

// Notes an update of `count` items.
PEARL_DEVICE void note_update(ReplayProgress& progress, std::uint64_t count, const Updated& updated) {
  const std::uint64_t items = updated.applied_infinite >> 32;
  progress.updates += items;
  progress.stale += count - items;
  progress.saturated += updated.applied_infinite & 0xFFFFFFFFu;
  if (updated.highest > progress.max_priority) progress.max_priority = updated.highest;
}

// Where lanes are parts of vectors. The last of duplicates wins. `generations` may be null: none is stale. An update that
// is refused changes nothing.
PEARL_DEVICE void update(const ReplayMemory& replay, const Place& place, const std::int64_t* indices,
                         const std::uint32_t* priorities, const std::uint32_t* generations, std::uint64_t count,
                         UpdateRefusal& refusal) {
  const auto fresh = [&](std::uint64_t i, std::uint64_t slot) {
    return generations == nullptr || generations[i] == replay.slots[slot].generation;
  };
  std::uint32_t highest = 0;   // finite; all ones: refused
  std::uint64_t applied = 0;   // upper half: count applied; lower half: how many of these are infinite
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const auto slot = static_cast<std::uint64_t>(indices[i]);
    const bool wrong = priorities[i] > kInfinityBits && priorities[i] != kClaim;  // minus zero is zero
    const std::uint32_t priority = raised(replay, priorities[i]);
    if (wrong || slot >= replay.capacity || replay.slots[slot].generation == 0) {
      highest = kNowhere;
    } else if (fresh(i, slot)) {
      applied += std::uint64_t{1} << 32 | (priority == kInfinityBits);
      if (priority < kInfinityBits && priority > highest) highest = priority;
    }
  }
  highest = largest(place, highest);
  if (highest == kNowhere) return refuse(replay, place, indices, priorities, count, refusal);
  applied = sum(place, applied);
  const std::int32_t scale = fit_scale(replay, place, highest);
  std::uint64_t grown = 0;
  // Leaves hold the claims, which are larger than any leaf.
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const auto slot = static_cast<std::uint64_t>(indices[i]);
    if (!fresh(i, slot)) continue;
    const std::uint32_t before =
        Atomic<std::uint32_t>(replay.leaves[slot]).fetch_max(kClaim | static_cast<std::uint32_t>(i));
    if (before < kClaim) grown -= large(before);
  }
  barrier(place);
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const auto slot = static_cast<std::uint64_t>(indices[i]);
    const std::uint32_t priority = raised(replay, priorities[i]);
    const std::uint32_t leaf = leaf_of(replay, priority, scale);
    if (!fresh(i, slot)) continue;
    const Atomic<std::uint32_t> claimed(replay.leaves[slot]);
    if (claimed.load() != (kClaim | static_cast<std::uint32_t>(i))) continue;
    claimed.store(leaf);
    grown += large(leaf);
    replay.slots[slot].priority = priority;
  }
  sum_parents(replay, place, indices, count);
  if (place.lane == 0) note_update(*replay.progress, count, {highest, applied});
  recover_scale(replay, place, scale, grown);
}

#endif

}  // namespace pearl::device
