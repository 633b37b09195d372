#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pearl/column_store.hpp"
#include "pearl/errors.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/worker_pool.hpp"

namespace {

using namespace pearl;

void philox_gives_the_published_words() {
  // Known answers of the Random123 distribution (kat_vectors).
  CHECK((philox4x32({0, 0, 0, 0}, 0) == PhiloxWords{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  CHECK((philox4x32({~0u, ~0u, ~0u, ~0u}, ~0ull) == PhiloxWords{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

void quantised_powers_are_accurate() {
  for (const double alpha : {0.0, 0.3, 0.6, 1.0, 2.0}) {
    for (float priority = 1e-3f; priority < 200.0f; priority *= 1.0137f) {
      const double exact = std::pow(static_cast<double>(priority), alpha) * 1048576.0;
      if (exact > kLeafMax) break;
      const double leaf = quantise(priority, exponent_q28(alpha), kDefaultScale);
      CHECK(std::abs(leaf - exact) <= 0.5 + 1e-7 * exact || (exact < 1.0 && leaf == 1.0));
    }
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  CHECK(quantise(0.0f, exponent_q28(0.6), kDefaultScale) == 0);
  CHECK(quantise(kInfinity, exponent_q28(0.6), kDefaultScale) == kLeafMax);
  for (const float priority : {std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max(), 255.99999f})
    for (const double alpha : {0.0, 0.6, 1.0, 4.0})
      for (const int scale : {20, 0, -400}) {
        const int excess = excess_bits(priority, exponent_q28(alpha), scale);
        CHECK(round_scaled(power_q32(log2_q32(priority), exponent_q28(alpha)), scale - excess) <= kLeafMax);
        CHECK(quantise(priority, exponent_q28(alpha), scale - excess) >= 1);
      }
}

void trees_of_every_fanout_find_the_same_leaves() {
  std::mt19937_64 random(1);
  for (const std::size_t capacity : {1, 2, 15, 16, 17, 255, 256, 257, 1000, 4097}) {
    std::vector<std::uint32_t> leaves(capacity);
    for (auto& leaf : leaves) leaf = random() % 3 == 0 ? 0 : static_cast<std::uint32_t>(random() % kLeafMax) + 1;
    leaves[random() % capacity] = kLeafMax;
    std::vector<std::int64_t> slots(capacity);
    std::iota(slots.begin(), slots.end(), 0);
    const std::uint64_t total = std::accumulate(leaves.begin(), leaves.end(), std::uint64_t{0});
    std::vector<std::uint64_t> targets = {0, total - 1};
    for (int i = 0; i < 35; ++i) targets.push_back(random() % total);
    for (unsigned fanout = 2; fanout <= 256; fanout *= 2) {
      const auto tree = make_sum_tree(capacity, fanout);
      tree->assign(slots.data(), leaves.data(), capacity);
      CHECK(tree->total() == total);
      std::vector<std::int64_t> found(targets.size());
      std::vector<std::uint32_t> values(targets.size());
      std::vector<std::uint64_t> used = targets;
          tree->find(used.data(), used.size(), 0, found.data(), values.data());
      for (std::size_t i = 0; i < targets.size(); ++i) {
        std::uint64_t prefix = 0;
        std::size_t expected = 0;
        while ((prefix += leaves[expected]) <= targets[i]) ++expected;
        CHECK(found[i] == static_cast<std::int64_t>(expected));
        CHECK(values[i] == leaves[expected]);
      }
      tree->rebuild();
      CHECK(tree->total() == total);
    }
  }
  CHECK(throws<ReplayError>([] { make_sum_tree(4, 3); }));
}

void threads_leave_an_exact_total() {
  constexpr std::size_t kCapacity = 777;
  SumTreeReplay replay(kCapacity, 16, 0.6, 5);
  std::vector<std::int64_t> all(kCapacity);
  std::iota(all.begin(), all.end(), 0);
  replay.insert(all.data(), nullptr, kCapacity);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&replay, t] {
      std::mt19937 random(t);
      std::vector<std::int64_t> indices(64);
      std::vector<float> values(64);
      std::vector<std::uint32_t> generations(64);
      for (int i = 0; i < 300; ++i) {
        replay.sample(64, 0.4, indices.data(), values.data(), generations.data());
        for (auto& value : values) value = static_cast<float>(random() % 100000) * 0.01f;
        replay.update(indices.data(), values.data(), generations.data(), 64);
        if (i % 10 == 0) replay.insert(indices.data(), values.data(), 8);
        if (i % 100 == 50) replay.set_alpha(0.5 + 0.01 * t);
        replay.state();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<float> priorities(kCapacity);
  std::vector<std::uint32_t> generations(kCapacity);
  std::vector<std::uint32_t> leaves(kCapacity);
  const ReplayState state = replay.save(priorities.data(), generations.data(), leaves.data());
  CHECK(state.total == std::accumulate(leaves.begin(), leaves.end(), std::uint64_t{0}));
  CHECK(state.filled == kCapacity);
}

void wrong_arguments_change_nothing() {
  SumTreeReplay replay(10, 4, 0.6, 0);
  const std::int64_t indices[] = {0, 1, 2};
  const float bad[] = {1.0f, std::nanf(""), -1.0f};
  const std::int64_t outside[] = {0, 10, -1};
  const float good[] = {1.0f, 2.0f, 3.0f};
  CHECK(throws<PriorityError>([&] { replay.insert(indices, bad, 3); }));
  CHECK(throws<ReplayError>([&] { replay.insert(outside, good, 3); }));
  CHECK(throws<ReplayError>([&] { replay.update(indices, good, nullptr, 3); }));
  CHECK(replay.state().filled == 0 && replay.state().total == 0);
  replay.close();
  CHECK(throws<ReplayError>([&] { replay.insert(indices, good, 3); }));
}

void items_come_in_order() {
  constexpr std::int64_t kCapacity = 40;
  const std::int64_t slots[] = {7, 2, 33, 2, 18};  // 2 is written again: oldest first 7, 33, 2, 18
  const float priorities[] = {3.0f, 9.0f, 3.0f, 5.0f, 0.0f};
  const auto take = [&](Selection selection, std::size_t count) {
    ReplayOptions options;
    options.selection = selection;
    options.max_times_sampled = 2;
    SumTreeReplay replay(kCapacity, 4, 0.6, 1, options);
    replay.insert(slots, priorities, 5);
    std::vector<std::int64_t> indices(4 * count);
    std::vector<float> weights(count);
    std::vector<std::uint32_t> generations(count);
    for (std::size_t call = 0; call < 4; ++call)
      replay.sample(count, 0.4, indices.data() + call * count, weights.data(), generations.data());
    return indices;
  };
  CHECK((take(Selection::kFifo, 2) == std::vector<std::int64_t>{7, 33, 7, 33, 2, 18, 2, 18}));
  CHECK((take(Selection::kLifo, 2) == std::vector<std::int64_t>{18, 2, 18, 2, 33, 7, 33, 7}));
  CHECK((take(Selection::kTopK, 1) == std::vector<std::int64_t>{2, 2, 7, 7}));
  CHECK(throws<ReplayError>([&] { take(Selection::kFifo, 3); }));
}

void draws_in_turn_leave_the_tree_as_it_was() {
  constexpr std::size_t kCapacity = 300;
  std::vector<std::int64_t> slots(kCapacity);
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<float> priorities(kCapacity);
  for (std::size_t i = 0; i < kCapacity; ++i) priorities[i] = i % 4 == 0 ? 0.0f : std::exp2(static_cast<float>(i % 27));
  for (const Selection selection : {Selection::kPrioritized, Selection::kUniform})
    for (const bool stratified : {true, false}) {
      ReplayOptions options;
      options.selection = selection;
      options.stratified = stratified;
      options.replacement = false;
      options.max_times_sampled = 4;
      SumTreeReplay replay(kCapacity, 16, 1.0, 7, options);
      replay.insert(slots.data(), priorities.data(), kCapacity);
      const std::uint64_t total = replay.state().total;
      const std::size_t available = selection == Selection::kPrioritized ? 225 : 300;
      std::vector<std::int64_t> indices(available + 1);
      std::vector<float> weights(available + 1);
      std::vector<std::uint32_t> generations(available + 1);
      const auto sample = [&](std::size_t count) {
        replay.sample(count, 0.4, indices.data(), weights.data(), generations.data());
      };
      for (int call = 0; call < 3; ++call) {
        sample(available);
        std::vector<std::int64_t> sorted(indices.begin(), indices.end() - 1);
        std::sort(sorted.begin(), sorted.end());
        CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
        CHECK(replay.state().total == total);
        CHECK(throws<ReplayError>([&] { sample(available + 1); }));
      }
      sample(available);  // the fourth and last time
      CHECK(replay.state().counters.exhausted == available);
      CHECK(selection == Selection::kUniform || replay.state().total == 0);
      CHECK(replay.statistics().samples_per_item == 4.0 * static_cast<double>(available) / kCapacity);
    }
}

void workers_change_nothing() {
  constexpr std::size_t kCapacity = 70000;
  constexpr std::size_t kBatch = 9001;
  std::vector<std::int64_t> all(kCapacity);
  std::iota(all.begin(), all.end(), 0);
  for (const bool stratified : {true, false}) {
    ReplayOptions options;
    options.stratified = stratified;
    SumTreeReplay alone(kCapacity, 16, 0.6, 7, options);
    options.workers = 4;
    SumTreeReplay shared(kCapacity, 16, 0.6, 7, options);
    std::mt19937 random(3);
    std::vector<float> priorities(kCapacity);
    for (auto& priority : priorities) priority = static_cast<float>(random() % 1000) * 0.01f;
    priorities[5] = 1e7f;  // drawn again and again, and beyond the scale
    for (auto* replay : {&alone, &shared}) replay->insert(all.data(), priorities.data(), kCapacity);
    std::vector<std::int64_t> indices(kBatch), others(kBatch);
    std::vector<float> weights(kBatch), other_weights(kBatch);
    std::vector<std::uint32_t> generations(kBatch), other_generations(kBatch);
    for (int round = 0; round < 20; ++round) {
      alone.sample(kBatch, 0.4, indices.data(), weights.data(), generations.data());
      shared.sample(kBatch, 0.4, others.data(), other_weights.data(), other_generations.data());
      CHECK(indices == others && weights == other_weights && generations == other_generations);
      for (auto& weight : weights) weight = static_cast<float>(random() % 1000) * 0.01f;
      const std::int64_t overwritten[] = {indices[4], indices[4000]};
      for (auto* replay : {&alone, &shared}) replay->insert(overwritten, nullptr, 2);
      const std::uint32_t* versions = round % 2 == 0 ? generations.data() : nullptr;
      CHECK(alone.update(indices.data(), weights.data(), versions, kBatch) ==
            shared.update(indices.data(), weights.data(), versions, kBatch));
      const ReplayStatistics left = alone.statistics(), right = shared.statistics();
      CHECK(left.state.total == right.state.total && left.histogram == right.histogram);
      CHECK(left.state.counters.stale == right.state.counters.stale);
      CHECK(left.state.scale == right.state.scale && left.state.looked_at == right.state.looked_at);
      CHECK(left.state.counters.recoveries == right.state.counters.recoveries);
      CHECK(left.samples_per_item == right.samples_per_item && left.age_mean == right.age_mean);
      CHECK(left.effective_sample_size == right.effective_sample_size);
      std::vector<std::uint32_t> leaves(kCapacity), other_leaves(kCapacity), versions_now(kCapacity);
      std::vector<float> raw(kCapacity), other_raw(kCapacity);
      alone.save(raw.data(), versions_now.data(), leaves.data());
      shared.save(other_raw.data(), versions_now.data(), other_leaves.data());
      CHECK(raw == other_raw && leaves == other_leaves);
    }
    std::fill(priorities.begin(), priorities.end(), 1.0f);
    for (auto* replay : {&alone, &shared}) {
      replay->update(all.data(), priorities.data(), nullptr, kCapacity);
      CHECK(replay->state().scale == kDefaultScale && replay->state().counters.recoveries > 0);
      CHECK(replay->state().total == kCapacity << kDefaultScale);
    }
  }
}

void pools_do_each_chunk_once() {
  WorkerPool pool(4);
  for (int job = 0; job < 500; ++job) {
    std::vector<int> times(1 + job % 50);
    pool.run(times.size(), [&](std::size_t chunk) { ++times[chunk]; });
    CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
  }
  std::vector<std::thread> callers;  // workers help one caller at a time; no caller waits
  std::atomic<int> total = 0;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      for (int job = 0; job < 100; ++job) pool.run(7, [&](std::size_t) { ++total; });
    });
  for (auto& caller : callers) caller.join();
  CHECK(total == 3 * 100 * 7);
}

void offered_chunks_are_done_by_the_end() {
  for (const unsigned workers : {1u, 2u, 3u}) {
    WorkerPool pool(workers, std::chrono::microseconds(50));
    pool.finish();  // of nothing
    for (int job = 0; job < 300; ++job) {
      std::vector<int> times(job % 4);
      const auto work = [&](std::size_t chunk) { ++times[chunk]; };
      pool.offer(times.size(), work);
      if (job % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(job));  // other workers may do all the work
      pool.finish();
      CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
    }
  }
}

void states_move_between_replays() {
  for (const Selection selection : {Selection::kPrioritized, Selection::kUniform, Selection::kFifo, Selection::kTopK}) {
    ReplayOptions options;
    options.selection = selection;
    options.max_times_sampled = 3;
    options.initial_priority = kInitialMean;
    SumTreeReplay first(50, 16, 0.7, 3, options);
    SumTreeReplay second(50, 4, 0.7, 99, options);
    const std::int64_t slots[] = {4, 40, 9, 21, 4};
    const float given[] = {1.0f, 4.0f, 1e7f, 2.0f, 8.0f};
    first.insert(slots, given, 5);
    first.insert(slots, nullptr, 1);
    std::vector<std::int64_t> indices(4), others(4), order;
    std::vector<float> weights(4), priorities(50);
    std::vector<std::uint32_t> generations(50), leaves(50);
    std::vector<std::uint16_t> times(50);
    first.sample(4, 0.4, indices.data(), weights.data(), generations.data());
    const ReplayState state =
        first.save(priorities.data(), generations.data(), leaves.data(), times.data(), &order);
    second.load(state, priorities.data(), generations.data(), leaves.data(), times.data(), order.data(),
                order.size());
    CHECK(second.statistics().histogram == first.statistics().histogram);
    for (auto* replay : {&first, &second}) replay->insert(slots + 2, nullptr, 1);
    CHECK(second.state().total == first.state().total);
    first.sample(4, 0.4, indices.data(), weights.data(), generations.data());
    second.sample(4, 0.4, others.data(), weights.data(), generations.data());
    CHECK(indices == others);
  }
}

void columns_wrap_around() {
  std::vector<std::int32_t> narrow(7);
  std::vector<char> wide(7 * 33);
  ColumnStore store(7, {{reinterpret_cast<char*>(narrow.data()), 4}, {wide.data(), 33}});
  std::vector<std::int32_t> rows = {1, 2, 3, 4, 5};
  std::vector<char> wide_rows(5 * 33);
  for (std::size_t i = 0; i < wide_rows.size(); ++i) wide_rows[i] = static_cast<char>(i);
  store.insert(4, 5, {rows.data(), wide_rows.data()});
  const std::int64_t indices[] = {4, 6, 0, 1};
  std::int32_t out[4];
  char wide_out[4 * 33];
  store.gather(indices, 4, 7, {out, wide_out});
  CHECK(out[0] == 1 && out[1] == 3 && out[2] == 4 && out[3] == 5);
  CHECK(wide_out[2 * 33] == static_cast<char>(3 * 33));
  CHECK(throws<ReplayError>([&] { store.gather(indices, 4, 6, {out, wide_out}); }));
}

}  // namespace

int main() {
  philox_gives_the_published_words();
  quantised_powers_are_accurate();
  trees_of_every_fanout_find_the_same_leaves();
  threads_leave_an_exact_total();
  wrong_arguments_change_nothing();
  items_come_in_order();
  draws_in_turn_leave_the_tree_as_it_was();
  workers_change_nothing();
  pools_do_each_chunk_once();
  offered_chunks_are_done_by_the_end();
  states_move_between_replays();
  columns_wrap_around();
}
