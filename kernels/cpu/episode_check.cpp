#include <cstdint>
#include <string>
#include <vector>

#include "pearl/episode_links.hpp"

namespace pearl {
namespace {

constexpr std::int64_t kMostPosition = std::int64_t{1} << 62;

class Check {
 public:
  Check(const EpisodeLinks& links, std::size_t size, std::size_t cursor)
      : a_(links.arrays()), capacity_(static_cast<std::int64_t>(links.capacity())),
        streams_(static_cast<std::int64_t>(links.streams())), slice_(static_cast<std::int64_t>(links.slice())),
        apart_(links.keeps_apart()), size_(static_cast<std::int64_t>(size)),
        oldest_(size == links.capacity() ? static_cast<std::int64_t>(cursor) : 0) {}

  std::string run() {
    for (int counter = 0; counter < EpisodeLinks::kCounters; ++counter) {
      const bool counts_slots = counter != EpisodeLinks::kBreaks;
      if (a_.counters[counter] < 0 || (counts_slots && a_.counters[counter] > capacity_))
        return "counter " + std::to_string(counter) + " is out of range";
    }
    for (std::int64_t slot = 0; slot < size_; ++slot)
      if (const char* wrong = range(slot)) return at(slot, wrong);
    for (std::int64_t slot = 0; slot < size_; ++slot)
      if (const char* wrong = order(slot)) return at(slot, wrong);
    for (std::int64_t stream = 0; stream < streams_; ++stream) {
      if (!open_fits(stream)) return "the open episode of stream " + std::to_string(stream) + " does not fit";
      const std::int64_t resumed = a_.resumed[stream];
      if (resumed < 0 || resumed > kMostPosition || (resumed != 0 && a_.open[stream] != 0))
        return "the position at which stream " + std::to_string(stream) + " goes on does not fit";
    }
    // Each row of a table belongs to exactly one live episode (or item), or is free.
    std::vector<bool> taken(static_cast<std::size_t>(capacity_));
    for (std::int64_t slot = 0; slot < size_; ++slot)
      if (a_.next[slot] < 0 && !take(taken, a_.episode[slot])) return at(slot, "shares its episode");
    if (!all_taken(taken, a_.free_episodes, EpisodeLinks::kEpisodes, EpisodeLinks::kFreeEpisodes))
      return "the list of free episodes does not fit";
    if (apart_) {
      taken.assign(static_cast<std::size_t>(capacity_), false);
      for (std::int64_t slot = 0; slot < size_; ++slot)
        if (a_.kept[slot] >= 0 && !take(taken, a_.kept[slot])) return at(slot, "shares its next observation");
      if (!all_taken(taken, a_.free_kept, EpisodeLinks::kKept, EpisodeLinks::kFreeKept))
        return "the list of free next observations does not fit";
    }
    return slice_ > 0 ? slices() : std::string();
  }

 private:
  static std::string at(std::int64_t slot, const char* wrong) { return "slot " + std::to_string(slot) + " " + wrong; }
  bool stored(std::int64_t slot) const { return slot >= 0 && slot < size_; }
  std::int64_t age(std::int64_t slot) const {
    return slot >= oldest_ ? slot - oldest_ : slot - oldest_ + capacity_;  // 0: the oldest
  }

  const char* range(std::int64_t slot) const {
    const std::int64_t next = a_.next[slot], prev = a_.prev[slot], episode = a_.episode[slot];
    if (next != -1 && (!stored(next) || age(next) <= age(slot))) return "has no newer item after it";
    if (prev != -1 && (!stored(prev) || age(prev) >= age(slot))) return "has no older item before it";
    if (episode < 0 || episode >= a_.counters[EpisodeLinks::kEpisodes]) return "is of no episode";
    if (a_.stream[episode] < 0 || a_.stream[episode] >= streams_) return "is of no stream";
    if (!stored(a_.last[episode])) return "is of an episode without an end";
    if (a_.position[slot] < 0 || a_.position[slot] > kMostPosition) return "is at no position of its episode";
    if (a_.ending[slot] > 2) return "has no known ending";
    if (!apart_) return nullptr;
    if (a_.kept[slot] < -1 || a_.kept[slot] >= a_.counters[EpisodeLinks::kKept]) return "keeps no observation";
    // The next observation is the next item's observation, or kept apart.
    return (a_.kept[slot] < 0) == (next < 0) ? "has no next observation" : nullptr;
  }

  const char* order(std::int64_t slot) const {
    const std::int64_t next = a_.next[slot], prev = a_.prev[slot], episode = a_.episode[slot];
    if (prev != -1 && a_.next[prev] != slot) return "does not follow the item before it";
    if (next == -1) return a_.last[episode] == slot ? nullptr : "is an end that its episode does not know";
    if (a_.prev[next] != slot || a_.episode[next] != episode || a_.position[next] != a_.position[slot] + 1)
      return "is not followed by the item after it";
    return a_.ending[slot] != 0 ? "goes on after its end" : nullptr;
  }

  bool open_fits(std::int64_t stream) const {
    const std::int64_t episode = a_.open[stream] - 1;
    if (episode == -1) return true;
    if (episode < 0 || episode >= a_.counters[EpisodeLinks::kEpisodes]) return false;
    const std::int64_t last = a_.last[episode];
    return stored(last) && a_.episode[last] == episode && a_.next[last] == -1 && a_.ending[last] == 0 &&
           a_.stream[episode] == stream;
  }

  static bool take(std::vector<bool>& taken, std::int64_t row) {
    const auto at = static_cast<std::size_t>(row);
    if (taken[at]) return false;
    return taken[at] = true;
  }
  bool all_taken(std::vector<bool>& taken, const std::int64_t* free, EpisodeLinks::Counter used,
                 EpisodeLinks::Counter freed) const {
    for (std::int64_t i = 0; i < a_.counters[freed]; ++i)
      if (free[i] < 0 || free[i] >= a_.counters[used] || !take(taken, free[i])) return false;
    for (std::int64_t row = 0; row < a_.counters[used]; ++row)
      if (!taken[static_cast<std::size_t>(row)]) return false;
    return true;
  }

  std::string slices() const {
    const std::int64_t starts = a_.counters[EpisodeLinks::kStarts];
    for (std::int64_t i = 0; i < starts; ++i)
      if (!stored(a_.starts[i]) || a_.start_place[a_.starts[i]] != i + 1) return "the list of slices does not fit";
    const auto left = [&](std::int64_t slot) {
      return a_.position[a_.last[a_.episode[slot]]] - a_.position[slot] + 1;
    };
    for (std::int64_t slot = 0; slot < size_; ++slot) {
      const std::int64_t place = a_.start_place[slot];
      const bool whole = left(slot) >= slice_;
      if (whole ? place < 1 || place > starts || a_.starts[place - 1] != slot : place != 0)
        return at(slot, "is in the wrong place of the list of slices");
      const std::int64_t before = a_.prev[slot], tail = a_.tail[a_.episode[slot]];
      const bool first_without = !whole && (before == -1 || left(before) >= slice_);
      if (first_without ? tail != slot : whole && a_.next[slot] == -1 && tail != -1)
        return at(slot, "is of an episode whose slices do not fit");
    }
    return {};
  }

  const EpisodeLinks::Arrays& a_;
  std::int64_t capacity_, streams_, slice_;
  bool apart_;
  std::int64_t size_, oldest_;
};

}  // namespace

std::string damage_of(const EpisodeLinks& links, std::size_t size, std::size_t cursor) {
  return Check(links, size, cursor).run();
}

}  // namespace pearl
