// Links between successive items of an episode in a ring, maintained as items are inserted. A query about the steps
// before or after an item costs one load per step, whatever the size of the ring.
//
// Items of several streams (environments) may be inserted interleaved. An item's predecessor is always older, and the
// ring overwrites the oldest first: only the link back to an overwritten item must be cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "pearl/errors.hpp"
#include "pearl/row_copy.hpp"

namespace pearl {

class EpisodeLinks {
 public:
  // All belong to the caller, are zeroed before the first use, and may be in a file or in memory shared with readers.
  struct Arrays {
    // One per slot.
    std::int64_t* next;      // slot after it in the episode, -1 for none
    std::int64_t* prev;      // slot before it if still stored, else -1
    std::int64_t* episode;   // row of the table of episodes
    std::int64_t* position;  // steps since the episode began
    std::uint8_t* ending;    // 0 not ended, 1 terminated, 2 truncated
    std::int64_t* kept;      // row in the table of next observations, -1 for none
    // One per episode; there are never more episodes than slots.
    std::int64_t* last;    // its newest slot
    std::int64_t* stream;  // its stream
    std::int64_t* tail;    // its first slot from which no whole slice starts yet, -1 for none
    // Stacks of free rows; the slots from which a whole slice starts; each slot's place in that list, plus 1.
    std::int64_t* free_episodes;
    std::int64_t* free_kept;
    std::int64_t* starts;
    std::int64_t* start_place;
    // One per stream.
    std::int64_t* open;     // the episode not ended yet, plus 1; 0 for none
    std::int64_t* resumed;  // next position of an episode that has not ended but has no stored item; 0 for none
    std::int64_t* awaited;  // hash of that episode's next observation
    std::int64_t* counters;  // of Counter
  };
  enum Counter { kEpisodes, kFreeEpisodes, kKept, kFreeKept, kStarts, kBreaks, kCounters };

  // Rows to insert, one per item; `positions` and the observations may be null.
  struct Rows {
    const std::int64_t* streams;
    const std::uint8_t* endings;
    const std::int64_t* positions;  // used where an item follows no stored one: the episode's beginning is lost
    const char* obs;
    const char* next_obs;
  };

  // At most one of `next_obs` (a column) and `kept_obs` (a separate table of next observations) is given. With neither,
  // every item of a stream is assumed to follow the one before.
  EpisodeLinks(Arrays arrays, std::size_t capacity, std::size_t streams, std::size_t slice, std::size_t obs_bytes,
               const char* obs, const char* next_obs, char* kept_obs)
      : a_(arrays), capacity_(capacity), streams_(streams), slice_(static_cast<std::int64_t>(slice)),
        obs_bytes_(obs_bytes), obs_(obs), next_obs_(next_obs), kept_obs_(kept_obs) {}

  std::size_t capacity() const { return capacity_; }
  std::size_t streams() const { return streams_; }
  std::size_t obs_bytes() const { return obs_bytes_; }
  std::size_t slice() const { return static_cast<std::size_t>(slice_); }
  const Arrays& arrays() const { return a_; }
  bool keeps_apart() const { return kept_obs_ != nullptr; }
  // Whether an insertion needs the rows' observations.
  bool compares() const { return kept_obs_ != nullptr || next_obs_ != nullptr; }

  // Links `count` items into the slots from `start` on (slots below `filled` held items), then calls `write`, which
  // writes the columns. Readers of this process never see a link to an item not yet written or already overwritten. One
  // thread at a time; waits for the readers. If it throws, nothing has changed.
  template <class Write>
  void insert(std::size_t start, std::size_t count, std::size_t filled, const Rows& rows, Write write) {
    for (std::size_t r = 0; r < count; ++r) {
      if (static_cast<std::uint64_t>(rows.streams[r]) >= streams_)
        throw ReplayError("Stream at position " + std::to_string(r) + " must lie in [0, " + std::to_string(streams_) +
                          "); found " + std::to_string(rows.streams[r]) + ".");
      if (rows.endings[r] > 2) throw ReplayError("An ending must be 0, 1 or 2.");
      if (rows.positions && (rows.positions[r] < 0 || rows.positions[r] >= std::int64_t{1} << 61))
        throw ReplayError("Position at position " + std::to_string(r) + " must lie in [0, 2**61); found " +
                          std::to_string(rows.positions[r]) + ".");
    }
    const std::unique_lock lock(mutex_);
    for (std::size_t r = 0; r < count; ++r) {
      const std::size_t slot = (start + r) % capacity_;
      if (slot < filled) evict(static_cast<std::int64_t>(slot));
      append(static_cast<std::int64_t>(slot), start, r, rows);
    }
    write();
  }

  // Steps from each item to the newest of its episode, both included. Any thread, like all methods below.
  void remaining(const std::int64_t* indices, std::size_t count, std::int64_t* out) const {
    const std::shared_lock lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t slot = indices[i];
      out[i] = a_.position[a_.last[a_.episode[slot]]] - a_.position[slot] + 1;
    }
  }

  // Slots `(count, length)` from each item on and how many there are in `found`; after the episode's end the last slot
  // repeats. With `back`: up to each item, oldest first; before the oldest stored slot that one repeats. Then calls
  // `copy`, which may read the columns in these slots: no insertion runs meanwhile.
  template <class Copy>
  void walk(const std::int64_t* indices, std::size_t count, std::size_t length, bool back, std::int64_t* slots,
            std::int64_t* found, Copy copy) const {
    const std::shared_lock lock(mutex_);
    follow(back ? a_.prev : a_.next, indices, count, length, back, slots, found);
    copy();
  }

  // The ending of each item (see Arrays).
  void endings(const std::int64_t* indices, std::size_t count, std::uint8_t* out) const {
    const std::shared_lock lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) out[i] = a_.ending[indices[i]];
  }

  // Starts of whole slices, uniformly: one per random number of 64 bits.
  void draw(const std::uint64_t* random, std::size_t count, std::int64_t* out) const {
    const std::shared_lock lock(mutex_);
    const auto starts = static_cast<std::uint64_t>(a_.counters[kStarts]);
    if (starts == 0)
      throw ReplayError("No episode stored holds " + std::to_string(slice_) + " steps yet; insert more first.");
    for (std::size_t i = 0; i < count; ++i) {
      __extension__ using Wide = unsigned __int128;
      out[i] = a_.starts[static_cast<std::uint64_t>((static_cast<Wide>(random[i]) * starts) >> 64)];
    }
  }

  // n-step returns from each item on. `steps`: up to the episode's end, at most n. Over these: `sum` of rewards times
  // `discounts` (n + 1 powers), the `last` item, and the `discount` of the value after it, 0 if the episode terminated.
  template <class Reward>
  void n_step(const std::int64_t* indices, std::size_t count, std::size_t n, const Reward* reward,
              const double* discounts, float* sum, std::int64_t* last, std::int64_t* steps, float* discount) const {
    const std::shared_lock lock(mutex_);
    for (std::size_t block = 0; block < count; block += kTogether) {
      const std::size_t end = std::min(count, block + kTogether);
      double total[kTogether] = {};
      for (std::size_t i = block; i < end; ++i) {
        total[i - block] += discounts[0] * static_cast<double>(reward[indices[i]]);
        last[i] = indices[i];
        steps[i] = 1;
      }
      for (std::size_t step = 1; step < n; ++step)
        for (std::size_t i = block; i < end; ++i) {
          const std::int64_t next = steps[i] == static_cast<std::int64_t>(step) ? a_.next[last[i]] : -1;
          if (next < 0) continue;
          total[i - block] += discounts[step] * static_cast<double>(reward[next]);
          last[i] = next;
          steps[i]++;
        }
      for (std::size_t i = block; i < end; ++i) {
        sum[i] = static_cast<float>(total[i - block]);
        discount[i] = a_.ending[last[i]] == 1 ? 0.0f : static_cast<float>(discounts[steps[i]]);
      }
    }
  }

  // Next observations of items, from the table or as the observation of the next item.
  void gather_next(const std::int64_t* indices, std::size_t count, char* target) const {
    const std::shared_lock lock(mutex_);
    copy_next(indices, count, target);
  }

  // gather_next() from within the `copy` of walk().
  void copy_next(const std::int64_t* indices, std::size_t count, char* target) const {
    constexpr std::size_t kAhead = 32;
    std::vector<const char*> sources(count + kAhead, obs_);
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        __builtin_prefetch(a_.kept + indices[i + kAhead]);
        __builtin_prefetch(a_.next + indices[i + kAhead]);
      }
      sources[i] = next_source(indices[i]);
    }
    if (obs_bytes_ >= kWideRow) return copy_rows(sources.data(), count, obs_bytes_, target);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t at = 0; at < obs_bytes_ && at < 256; at += 64)
        __builtin_prefetch(sources[i + kAhead] + at, 0, 0);
      std::memcpy(target + i * obs_bytes_, sources[i], obs_bytes_);
    }
  }

 private:
  // Items walked together, step by step: their loads overlap and their rows stay in cache.
  static constexpr std::size_t kTogether = 32;

  const char* next_source(std::int64_t slot) const {
    const std::int64_t row = a_.kept[slot];
    if (row >= 0) return kept_obs_ + static_cast<std::size_t>(row) * obs_bytes_;
    const std::int64_t next = a_.next[slot];
    // Both are absent only while another process is writing; the reader detects that and tries again.
    return obs_ + static_cast<std::size_t>(next >= 0 ? next : slot) * obs_bytes_;
  }

  static void follow(const std::int64_t* links, const std::int64_t* indices, std::size_t count, std::size_t length,
                     bool back, std::int64_t* slots, std::int64_t* found) {
    const std::size_t first = back ? length - 1 : 0;
    for (std::size_t block = 0; block < count; block += kTogether) {
      const std::size_t end = std::min(count, block + kTogether);
      for (std::size_t i = block; i < end; ++i) {
        slots[i * length + first] = indices[i];
        found[i] = 1;
      }
      for (std::size_t step = 1; step < length; ++step)
        for (std::size_t i = block; i < end; ++i) {
          std::int64_t* row = slots + i * length;
          const std::size_t to = back ? length - 1 - step : step;
          const std::int64_t from = row[back ? to + 1 : to - 1];
          const std::int64_t next = found[i] == static_cast<std::int64_t>(step) ? links[from] : -1;
          row[to] = next >= 0 ? next : from;
          found[i] += next >= 0;
        }
    }
  }

  std::int64_t take(Counter used, Counter freed, const std::int64_t* stack) {
    if (a_.counters[freed] > 0) return stack[--a_.counters[freed]];
    return a_.counters[used]++;
  }

  void evict(std::int64_t slot) {
    const std::int64_t episode = a_.episode[slot];
    const std::int64_t next = a_.next[slot];
    if (next >= 0) a_.prev[next] = -1;
    const std::int64_t awaited = a_.last[episode] == slot ? hash_of_next(slot) : 0;
    if (kept_obs_) release_kept(slot);
    if (slice_) {
      remove_start(slot);
      if (a_.tail[episode] == slot) a_.tail[episode] = next;
    }
    if (a_.last[episode] != slot) return;
    std::int64_t& open = a_.open[a_.stream[episode]];
    if (open == episode + 1) {
      open = 0;
      a_.resumed[a_.stream[episode]] = a_.position[slot] + 1;
      a_.awaited[a_.stream[episode]] = awaited;
    }
    a_.free_episodes[a_.counters[kFreeEpisodes]++] = episode;
  }

  void append(std::int64_t slot, std::size_t start, std::size_t row, const Rows& rows) {
    std::int64_t& open = a_.open[rows.streams[row]];
    std::int64_t before = open ? a_.last[open - 1] : -1;
    if (before >= 0 && !follows(before, start, row, rows)) {
      a_.counters[kBreaks]++;
      before = -1;
    }
    std::int64_t episode;
    if (before >= 0) {
      episode = open - 1;
      a_.next[before] = slot;
      a_.position[slot] = a_.position[before] + 1;
      if (kept_obs_) release_kept(before);
    } else {
      episode = take(kEpisodes, kFreeEpisodes, a_.free_episodes);
      a_.stream[episode] = rows.streams[row];
      a_.tail[episode] = -1;
      a_.position[slot] = rows.positions ? rows.positions[row] : resumed_position(row, rows);
    }
    a_.resumed[rows.streams[row]] = 0;
    a_.prev[slot] = before;
    a_.next[slot] = -1;
    a_.episode[slot] = episode;
    a_.ending[slot] = rows.endings[row];
    a_.last[episode] = slot;
    open = rows.endings[row] ? 0 : episode + 1;
    if (kept_obs_) {
      a_.kept[slot] = take(kKept, kFreeKept, a_.free_kept);
      std::memcpy(kept_obs_ + static_cast<std::size_t>(a_.kept[slot]) * obs_bytes_,
                  rows.next_obs + row * obs_bytes_, obs_bytes_);
    }
    if (slice_) add_start(slot, episode);
  }

  // The position of a row that follows no stored item.
  std::int64_t resumed_position(std::size_t row, const Rows& rows) {
    const std::int64_t stream = rows.streams[row];
    if (a_.resumed[stream] == 0) return 0;
    if (!compares() || hash_of(rows.obs + row * obs_bytes_) == a_.awaited[stream]) return a_.resumed[stream];
    a_.counters[kBreaks]++;
    return 0;
  }

  // Hash of the observation after an episode's newest item, which is stored.
  std::int64_t hash_of_next(std::int64_t slot) const {
    if (!compares()) return 0;
    return hash_of(kept_obs_ ? kept_obs_ + static_cast<std::size_t>(a_.kept[slot]) * obs_bytes_
                             : next_obs_ + static_cast<std::size_t>(slot) * obs_bytes_);
  }

  std::int64_t hash_of(const char* observation) const {
    std::uint64_t hash = obs_bytes_;
    for (std::size_t at = 0; at < obs_bytes_; at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, observation + at, std::min(sizeof word, obs_bytes_ - at));
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return static_cast<std::int64_t>(hash);
  }

  // Whether the row's observation equals the next observation of the item in slot `before`.
  bool follows(std::int64_t before, std::size_t start, std::size_t row, const Rows& rows) const {
    const char* expected;
    if (kept_obs_) {
      expected = kept_obs_ + static_cast<std::size_t>(a_.kept[before]) * obs_bytes_;
    } else if (next_obs_) {
      const std::size_t ago = (static_cast<std::size_t>(before) + capacity_ - start % capacity_) % capacity_;
      expected = ago < row ? rows.next_obs + ago * obs_bytes_  // inserted now: not in the column yet
                           : next_obs_ + static_cast<std::size_t>(before) * obs_bytes_;
    } else {
      return true;
    }
    return std::memcmp(expected, rows.obs + row * obs_bytes_, obs_bytes_) == 0;
  }

  void release_kept(std::int64_t slot) {
    if (a_.kept[slot] < 0) return;
    a_.free_kept[a_.counters[kFreeKept]++] = a_.kept[slot];
    a_.kept[slot] = -1;
  }

  void add_start(std::int64_t slot, std::int64_t episode) {
    a_.start_place[slot] = 0;
    std::int64_t& tail = a_.tail[episode];
    if (tail < 0) tail = slot;
    if (a_.position[slot] - a_.position[tail] + 1 < slice_) return;
    a_.starts[a_.counters[kStarts]] = tail;
    a_.start_place[tail] = ++a_.counters[kStarts];  // plus 1: 0 means none
    tail = a_.next[tail];
  }

  void remove_start(std::int64_t slot) {
    const std::int64_t place = a_.start_place[slot];
    if (place == 0) return;
    const std::int64_t moved = a_.starts[--a_.counters[kStarts]];
    a_.starts[place - 1] = moved;
    a_.start_place[moved] = place;
    a_.start_place[slot] = 0;
  }

  Arrays a_;
  std::size_t capacity_;
  std::size_t streams_;
  std::int64_t slice_;
  std::size_t obs_bytes_;
  const char* obs_;
  const char* next_obs_;
  char* kept_obs_;
  mutable std::shared_mutex mutex_;
};

// Describes the first fault of a ring's links, loaded from a file perhaps; empty if there is none. Slots below `size` hold
// items; `cursor` is the next slot to write. Links that pass never lead to an access out of bounds.
std::string damage_of(const EpisodeLinks& links, std::size_t size, std::size_t cursor);

}  // namespace pearl
