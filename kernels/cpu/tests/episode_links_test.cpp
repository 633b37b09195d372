#include "pearl/episode_links.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "pearl/column_store.hpp"

namespace {

using namespace pearl;

constexpr std::size_t kItem = 12;  // bytes of an observation: no power of two

// All arrays of EpisodeLinks, and the columns of observations and numbers.
struct Ring {
  Ring(std::size_t capacity, std::size_t streams, std::size_t slice, bool share)
      : share(share), arrays(16, std::vector<std::int64_t>(std::max<std::size_t>({capacity, streams, 8}))),
        ending(capacity), obs(capacity * kItem), next_obs(capacity * kItem), kept(capacity * kItem), number(capacity),
        links({a(0), a(1), a(2), a(3), ending.data(), share ? a(4) : nullptr, a(5), a(6), a(7), a(8),
               share ? a(9) : nullptr, slice ? a(10) : nullptr, slice ? a(11) : nullptr, a(12), a(14), a(15), a(13)},
              capacity, streams, slice, kItem, obs.data(), share ? nullptr : next_obs.data(),
              share ? kept.data() : nullptr),
        columns(capacity, {{reinterpret_cast<char*>(number.data()), sizeof(std::int64_t)},
                           {obs.data(), kItem},
                           {share ? kept.data() : next_obs.data(), kItem}}) {}

  std::int64_t* a(std::size_t i) { return arrays[i].data(); }
  std::int64_t counter(EpisodeLinks::Counter which) { return arrays[13][which]; }

  bool share;
  std::vector<std::vector<std::int64_t>> arrays;
  std::vector<std::uint8_t> ending;
  std::vector<char> obs, next_obs, kept;
  std::vector<std::int64_t> number;
  EpisodeLinks links;
  ColumnStore columns;
};

// The expected answers, from a list of all steps ever made.
struct Step {
  std::int64_t stream, episode, position;
  std::uint8_t ending;
  std::uint32_t obs, next_obs;
};

std::vector<char> image(std::uint32_t value) {
  std::vector<char> bytes(kItem);
  for (std::size_t i = 0; i < kItem; i += sizeof value) std::memcpy(bytes.data() + i, &value, sizeof value);
  return bytes;
}

class World {
 public:
  World(std::size_t capacity, std::size_t streams, std::size_t slice, bool share, std::uint32_t seed)
      : ring(capacity, streams, slice, share), capacity_(capacity), slice_(slice), random_(seed), last_(streams, -1) {}

  void insert(std::size_t count) {
    const std::size_t start = steps_.size() % capacity_;
    const std::size_t filled = std::min(steps_.size(), capacity_);
    std::vector<std::int64_t> streams, numbers;
    std::vector<std::uint8_t> endings;
    std::vector<char> obs, next_obs;
    for (std::size_t i = 0; i < count; ++i) {
      const Step step = make();
      streams.push_back(step.stream);
      endings.push_back(step.ending);
      numbers.push_back(static_cast<std::int64_t>(steps_.size()));
      for (const auto& [bytes, value] : {std::pair(&obs, step.obs), std::pair(&next_obs, step.next_obs)}) {
        const std::vector<char> item = image(value);
        bytes->insert(bytes->end(), item.begin(), item.end());
      }
      last_[static_cast<std::size_t>(step.stream)] = static_cast<std::int64_t>(steps_.size());
      steps_.push_back(step);
    }
    ring.links.insert(start, count, filled, {streams.data(), endings.data(), nullptr, obs.data(), next_obs.data()},
                      [&] { write(start, numbers, obs, next_obs); });
  }

  std::string damage() const {
    return damage_of(ring.links, std::min(steps_.size(), capacity_), steps_.size() % capacity_);
  }

  // Runs every query, ignores the answers.
  void use() {
    const std::size_t count = std::min(steps_.size(), capacity_);
    std::vector<std::int64_t> slots(count), walked(count * 5), found(count), last(count), steps(count);
    for (std::size_t i = 0; i < count; ++i) slots[i] = static_cast<std::int64_t>(i);
    const std::vector<float> rewards(capacity_);
    const std::vector<double> discounts(6, 0.5);
    std::vector<float> sums(count), after(count);
    std::vector<char> next(count * 5 * kItem);
    const auto copy = [&] { if (ring.share) ring.links.copy_next(walked.data(), count * 5, next.data()); };
    ring.links.walk(slots.data(), count, 5, false, walked.data(), found.data(), copy);
    ring.links.walk(slots.data(), count, 5, true, walked.data(), found.data(), copy);
    ring.links.remaining(slots.data(), count, found.data());
    ring.links.n_step(slots.data(), count, 5, rewards.data(), discounts.data(), sums.data(), last.data(), steps.data(),
                      after.data());
    if (slice_ && ring.counter(EpisodeLinks::kStarts) > 0) {
      const std::uint64_t words[2] = {0, ~std::uint64_t{0}};
      ring.links.draw(words, 2, walked.data());
      CHECK(walked[0] < static_cast<std::int64_t>(count) && walked[1] < static_cast<std::int64_t>(count));
    }
  }

  void check(std::size_t length) {
    const std::size_t first = steps_.size() - std::min(steps_.size(), capacity_);
    std::vector<std::int64_t> slots;
    for (std::size_t n = first; n < steps_.size(); ++n) slots.push_back(slot(static_cast<std::int64_t>(n)));
    const std::size_t count = slots.size();
    if (count == 0) return;
    std::vector<std::int64_t> after(count * length), before(count * length), found(count), found_before(count);
    std::vector<std::int64_t> left(count), last(count), steps(count);
    std::vector<std::uint8_t> endings(count);
    std::vector<float> sums(count), discounts_after(count);
    std::vector<double> rewards(capacity_), discounts(length + 1);
    for (std::size_t i = 0; i < capacity_; ++i) rewards[i] = static_cast<double>(ring.number[i]);
    for (std::size_t k = 0; k <= length; ++k) discounts[k] = k == 0 ? 1.0 : discounts[k - 1] * 0.5;
    std::vector<char> next(count * kItem);
    const auto nothing = [] {};
    ring.links.walk(slots.data(), count, length, false, after.data(), found.data(), nothing);
    ring.links.walk(slots.data(), count, length, true, before.data(), found_before.data(), nothing);
    ring.links.remaining(slots.data(), count, left.data());
    ring.links.endings(slots.data(), count, endings.data());
    ring.links.n_step(slots.data(), count, length, rewards.data(), discounts.data(), sums.data(), last.data(),
                      steps.data(), discounts_after.data());
    if (ring.share) ring.links.gather_next(slots.data(), count, next.data());

    std::size_t starts = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::vector<std::int64_t> episode = episode_of(first, first + i);
      const auto here = std::find(episode.begin(), episode.end(), static_cast<std::int64_t>(first + i));
      const auto to_end = static_cast<std::size_t>(episode.end() - here);
      const auto to_begin = static_cast<std::size_t>(here - episode.begin()) + 1;
      const Step& step = steps_[first + i];
      CHECK(left[i] == static_cast<std::int64_t>(to_end));
      CHECK(found[i] == static_cast<std::int64_t>(std::min(to_end, length)));
      CHECK(found_before[i] == static_cast<std::int64_t>(std::min(to_begin, length)));
      CHECK(endings[i] == step.ending);
      CHECK(ring.a(3)[slots[i]] == step.position);
      double sum = 0.0;
      for (std::size_t k = 0; k < length; ++k) {
        const std::int64_t expected = *(here + static_cast<std::ptrdiff_t>(std::min(k, to_end - 1)));
        CHECK(after[i * length + k] == slot(expected));
        const std::int64_t earlier = *(here - static_cast<std::ptrdiff_t>(std::min(k, to_begin - 1)));
        CHECK(before[(i + 1) * length - 1 - k] == slot(earlier));
        if (k < to_end) sum += discounts[k] * static_cast<double>(expected);
      }
      const std::int64_t newest = *(here + static_cast<std::ptrdiff_t>(found[i] - 1));
      CHECK(sums[i] == static_cast<float>(sum) && last[i] == slot(newest) && steps[i] == found[i]);
      const bool terminated = steps_[static_cast<std::size_t>(newest)].ending == 1;
      const double discount = terminated ? 0.0 : discounts[static_cast<std::size_t>(steps[i])];
      CHECK(discounts_after[i] == static_cast<float>(discount));
      if (ring.share) CHECK(std::memcmp(next.data() + i * kItem, image(step.next_obs).data(), kItem) == 0);
      if (slice_ && to_end >= slice_) starts++;
    }
    check_steps(slots, after, found, length);
    check_starts(slots, left, starts);
  }

  Ring ring;

 private:
  std::int64_t slot(std::int64_t number) const { return number % static_cast<std::int64_t>(capacity_); }

  Step make() {
    const auto stream = static_cast<std::int64_t>(random_() % last_.size());
    const std::int64_t before = last_[static_cast<std::size_t>(stream)];
    const bool lost = random_() % 16 == 0;
    Step step{};
    step.stream = stream;
    step.next_obs = ++images_;
    step.ending = random_() % 8 ? 0 : static_cast<std::uint8_t>(1 + random_() % 2);
    if (before >= 0 && !lost && steps_[static_cast<std::size_t>(before)].ending == 0) {
      const Step& previous = steps_[static_cast<std::size_t>(before)];
      step.episode = previous.episode;
      step.position = previous.position + 1;
      step.obs = previous.next_obs;
    } else {
      step.episode = episodes_++;
      step.obs = ++images_;
    }
    return step;
  }

  void write(std::size_t start, const std::vector<std::int64_t>& numbers, const std::vector<char>& obs,
             const std::vector<char>& next_obs) {
    for (std::size_t r = 0; r < numbers.size(); ++r) {
      const std::size_t slot = (start + r) % capacity_;
      ring.number[slot] = numbers[r];
      std::memcpy(ring.obs.data() + slot * kItem, obs.data() + r * kItem, kItem);
      if (!ring.share) std::memcpy(ring.next_obs.data() + slot * kItem, next_obs.data() + r * kItem, kItem);
    }
  }

  std::vector<std::int64_t> episode_of(std::size_t first, std::size_t number) const {
    std::vector<std::int64_t> members;
    for (std::size_t n = first; n < steps_.size(); ++n)
      if (steps_[n].episode == steps_[number].episode) members.push_back(static_cast<std::int64_t>(n));
    return members;
  }

  // The columns of the valid steps, zeros for the others.
  void check_steps(const std::vector<std::int64_t>& slots, const std::vector<std::int64_t>& after,
                   const std::vector<std::int64_t>& found, std::size_t length) {
    const Steps steps{after.data(), found.data(), slots.size(), length, false};
    std::vector<std::int64_t> numbers(after.size(), -1);
    std::vector<char> mask(after.size(), 7);
    ring.columns.gather_steps(0, steps, reinterpret_cast<char*>(numbers.data()));
    mask_steps(steps, reinterpret_cast<bool*>(mask.data()));
    for (std::size_t i = 0; i < after.size(); ++i) {
      const bool counts = i % length < static_cast<std::size_t>(found[i / length]);
      CHECK(mask[i] == static_cast<char>(counts));
      CHECK(numbers[i] == (counts ? ring.number[static_cast<std::size_t>(after[i])] : 0));
    }
  }

  void check_starts(const std::vector<std::int64_t>& slots, const std::vector<std::int64_t>& left, std::size_t starts) {
    if (!slice_) return;
    CHECK(ring.counter(EpisodeLinks::kStarts) == static_cast<std::int64_t>(starts));
    std::vector<std::uint64_t> words(64);
    for (auto& word : words) word = (static_cast<std::uint64_t>(random_()) << 32) | random_();
    std::vector<std::int64_t> drawn(words.size());
    if (starts == 0) {
      CHECK(throws<ReplayError>([&] { ring.links.draw(words.data(), words.size(), drawn.data()); }));
      return;
    }
    ring.links.draw(words.data(), words.size(), drawn.data());
    for (const std::int64_t start : drawn) {
      const auto at = std::find(slots.begin(), slots.end(), start);
      CHECK(at != slots.end());
      CHECK(left[static_cast<std::size_t>(at - slots.begin())] >= static_cast<std::int64_t>(slice_));
    }
  }

  std::size_t capacity_;
  std::size_t slice_;
  std::mt19937 random_;
  std::vector<std::int64_t> last_;
  std::vector<Step> steps_;
  std::int64_t episodes_ = 0;
  std::uint32_t images_ = 0;
};

void links_tell_what_a_list_of_steps_tells() {
  std::mt19937 random(1);
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const std::size_t capacity = 1 + random() % 50;
    World world(capacity, 1 + random() % 4, random() % 4, seed % 2 == 1, seed);
    for (int round = 0; round < 12; ++round) {
      world.insert(random() % (capacity + 1));
      world.check(1 + random() % 6);
      CHECK(world.damage().empty());
    }
    // Freed rows are reused: the tables never outgrow the slots.
    CHECK(world.ring.counter(EpisodeLinks::kEpisodes) <= static_cast<std::int64_t>(capacity));
    CHECK(world.ring.counter(EpisodeLinks::kKept) <= static_cast<std::int64_t>(capacity));
  }
}

// Changes one number of the links: the check finds it, or no query depends on it.
void damaged_links_are_found_or_harmless() {
  std::mt19937 random(2);
  std::size_t found = 0;
  constexpr std::uint32_t kWorlds = 4000;
  for (std::uint32_t seed = 0; seed < kWorlds; ++seed) {
    const std::size_t capacity = 2 + random() % 12;
    World world(capacity, 1 + random() % 3, random() % 4, seed % 2 == 1, seed);
    for (int round = 0; round < 3; ++round) world.insert(random() % (capacity + 1));
    if (random() % 8 == 0) {
      world.ring.ending[random() % capacity] = static_cast<std::uint8_t>(random() % 5);
    } else {
      auto& array = world.ring.arrays[random() % 14];
      const bool near = random() % 4 != 0;
      array[random() % capacity] = near ? static_cast<std::int64_t>(random() % (capacity + 3)) - 2
                                        : static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random());
    }
    if (!world.damage().empty()) {
      ++found;
      continue;
    }
    for (int round = 0; round < 4; ++round) {
      world.use();
      world.insert(1 + random() % capacity);
    }
    CHECK(world.damage().empty());
  }
  CHECK(found > kWorlds / 4 && found < kWorlds);
}

void refused_rows_change_nothing() {
  World world(10, 2, 2, true, 3);
  world.insert(7);
  const auto before = world.ring.arrays;
  const std::vector<char> obs(2 * kItem);
  bool written = false;
  for (const auto& [streams, endings] : {std::pair(std::vector<std::int64_t>{0, 2}, std::vector<std::uint8_t>{0, 0}),
                                         std::pair(std::vector<std::int64_t>{0, -1}, std::vector<std::uint8_t>{0, 0}),
                                         std::pair(std::vector<std::int64_t>{0, 1}, std::vector<std::uint8_t>{0, 3})})
    CHECK(throws<ReplayError>([&, streams = &streams, endings = &endings] {
      world.ring.links.insert(7, 2, 7, {streams->data(), endings->data(), nullptr, obs.data(), obs.data()},
                              [&] { written = true; });
    }));
  const std::int64_t streams[] = {0, 1};
  const std::uint8_t endings[] = {0, 0};
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{1} << 61}) {
    const std::int64_t positions[] = {0, wrong};
    CHECK(throws<ReplayError>([&] {
      world.ring.links.insert(7, 2, 7, {streams, endings, positions, obs.data(), obs.data()}, [&] { written = true; });
    }));
  }
  CHECK(!written && world.ring.arrays == before);
}

// One thread inserts steps with increasing observations; the other queries the successors of items that stay stored.
void readers_see_whole_steps_beside_an_insertion(bool share) {
  constexpr std::size_t kCapacity = 256;
  constexpr std::size_t kRows = 16;
  constexpr std::size_t kLength = 4;
  constexpr std::int64_t kRounds = 2000;
  Ring ring(kCapacity, 1, kLength, share);
  const std::vector<std::int64_t> streams(kRows, 0);
  std::vector<std::uint8_t> endings(kRows, 0);
  std::vector<std::int64_t> numbers(kRows);
  std::vector<char> obs(kRows * kItem), next_obs(kRows * kItem);
  std::int64_t made = 0;
  const auto insert = [&] {
    const auto start = static_cast<std::size_t>(made) % kCapacity;
    const std::size_t filled = std::min(static_cast<std::size_t>(made), kCapacity);
    for (std::size_t r = 0; r < kRows; ++r, ++made) {
      numbers[r] = made;
      std::memcpy(obs.data() + r * kItem, image(static_cast<std::uint32_t>(made)).data(), kItem);
      std::memcpy(next_obs.data() + r * kItem, image(static_cast<std::uint32_t>(made + 1)).data(), kItem);
    }
    const EpisodeLinks::Rows rows{streams.data(), endings.data(), nullptr, obs.data(), next_obs.data()};
    ring.links.insert(start, kRows, filled, rows, [&] {
      std::memcpy(ring.number.data() + start, numbers.data(), kRows * sizeof(std::int64_t));
      std::memcpy(ring.obs.data() + start * kItem, obs.data(), obs.size());
      if (!share) std::memcpy(ring.next_obs.data() + start * kItem, next_obs.data(), next_obs.size());
    });
  };
  for (std::size_t i = 0; i < kCapacity / kRows; ++i) insert();
  std::thread writer([&] {
    for (std::int64_t round = 0; round < kRounds; ++round) insert();
  });
  constexpr std::size_t kStarts = 64;
  std::vector<std::int64_t> starts(kStarts), slots(kStarts * kLength), found(kStarts), numbers_found(slots.size());
  std::vector<char> next_found(slots.size() * kItem);
  for (std::size_t i = 0; i < kStarts; ++i) starts[i] = static_cast<std::int64_t>(i * (kCapacity / kStarts));
  for (int round = 0; round < 500; ++round) {
    ring.links.walk(starts.data(), kStarts, kLength, false, slots.data(), found.data(), [&] {
      const Steps steps{slots.data(), found.data(), kStarts, kLength, false};
      ring.columns.gather_steps(0, steps, reinterpret_cast<char*>(numbers_found.data()));
      if (share) ring.links.copy_next(slots.data(), slots.size(), next_found.data());
    });
    for (std::size_t i = 0; i < kStarts; ++i)
      for (std::size_t k = 0; k < static_cast<std::size_t>(found[i]); ++k) {
        const std::int64_t number = numbers_found[i * kLength + k];
        CHECK(number == numbers_found[i * kLength] + static_cast<std::int64_t>(k));
        if (share)
          CHECK(std::memcmp(next_found.data() + (i * kLength + k) * kItem,
                            image(static_cast<std::uint32_t>(number + 1)).data(), kItem) == 0);
      }
  }
  writer.join();
}

}  // namespace

int main() {
  links_tell_what_a_list_of_steps_tells();
  refused_rows_change_nothing();
  damaged_links_are_found_or_harmless();
  readers_see_whole_steps_beside_an_insertion(false);
  readers_see_whole_steps_beside_an_insertion(true);
}
