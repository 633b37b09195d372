#include "pearl/training_loop.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "pearl/errors.hpp"

namespace {

using namespace pearl;

constexpr std::size_t kCapacity = 500;
constexpr std::size_t kBatch = 32;
constexpr std::size_t kInputs = 3;
constexpr std::size_t kActions = 3;
constexpr std::size_t kPolicy = 10;
const std::size_t kSnapshotBytes = Snapshot::nbytes(4 * kPolicy);

// Every number of a row encodes its item, so that a row that is half old and half new is detected.
struct Rows {
  explicit Rows(std::size_t count)
      : obs(count * kInputs), next(count * kInputs), reward(count), discount(count), action(count),
        masks(count * kActions) {}
  void set(std::size_t row, float item) {
    for (std::size_t k = 0; k < kInputs; ++k) {
      obs[row * kInputs + k] = item;
      next[row * kInputs + k] = item + 0.5f;
    }
    reward[row] = discount[row] = item;
    action[row] = static_cast<std::int64_t>(item);
    std::fill_n(masks.begin() + static_cast<std::ptrdiff_t>(row * kActions), kActions, mask_of(item));
  }
  std::vector<float> obs, next, reward, discount;
  std::vector<std::int64_t> action;
  std::vector<std::uint8_t> masks;

  static std::uint8_t mask_of(float item) { return static_cast<std::uint8_t>(static_cast<std::int64_t>(item) % 251); }
};

class Recorder : public learner::Algorithm {
 public:
  std::vector<std::size_t> item_bytes() const override {
    std::vector<std::size_t> bytes = {4 * kInputs, 8, 4, 4 * kInputs, 4};
    if (masked) bytes.push_back(kActions);
    return bytes;
  }
  learner::StepMetrics step(const learner::Batch& batch, float* priorities,
                            const learner::PrioritiesKnown& known) override {
    CHECK(batch.rows == kBatch);
    check(batch);
    items.insert(items.end(), batch.rewards, batch.rewards + batch.rows);
    weights.insert(weights.end(), batch.weights, batch.weights + batch.rows);
    for (std::size_t i = 0; i < batch.rows; ++i) priorities[i] = 0.25f + batch.rewards[i];
    ++steps;
    if (fail_at == steps) throw LearnerError("diverged");
    if (wrong_at == steps) priorities[5] = -1.0f;
    if (known) {
      ++told;
      if (steps % 5 == 0)
        std::thread(known).join();  // any thread of the Learner may call it
      else
        known();
      if (steps % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
      check(batch);  // it is still being trained
    }
    policy[0] = static_cast<float>(steps);
    if (fail_late_at == steps) throw LearnerError("diverged");
    return {1.0, 2.0, 3.0};
  }
  void check(const learner::Batch& batch) const {
    const auto* actions = static_cast<const std::int64_t*>(batch.actions);
    const auto *obs = static_cast<const float*>(batch.obs), *next_obs = static_cast<const float*>(batch.next_obs);
    for (std::size_t i = 0; i < batch.rows; ++i) {
      const float item = batch.rewards[i];
      CHECK(batch.discounts[i] == item && actions[i] == static_cast<std::int64_t>(item));
      for (std::size_t k = 0; k < kInputs; ++k)
        CHECK(obs[i * kInputs + k] == item && next_obs[i * kInputs + k] == item + 0.5f);
      for (std::size_t k = 0; k < kActions; ++k) CHECK(batch.next_masks[i * kActions + k] == Rows::mask_of(item));
      CHECK(banked || (batch.weights[i] > 0.0f && batch.weights[i] <= 1.0f));
    }
  }
  bool trained_last(const learner::Batch& batch) const {
    return std::equal(batch.rewards, batch.rewards + batch.rows, items.end() - kBatch);
  }
  std::vector<float> policy = std::vector<float>(kPolicy);
  bool masked = true;
  bool banked = false;  // weights may be 0, and above 1
  std::uint64_t steps = 0;
  std::uint64_t fail_at = 0, fail_late_at = 0;  // before and after the priorities are known
  std::uint64_t wrong_at = 0;                   // a step with a priority that the Replay Manager refuses
  std::uint64_t told = 0;
  std::vector<float> items, weights;  // of all batches
};

std::vector<char> zeroed(std::size_t nbytes) { return std::vector<char>(nbytes + kCacheLine); }

struct Fixture {
  explicit Fixture(const ReplayOptions& options = {})
      : grants(memory(grants_memory, SlotQueue::nbytes(2, 128)), grants_size(2), 2, 128, true),
        done(memory(done_memory, SlotQueue::nbytes(2, 128)), grants_size(2), 2, 128, true),
        snapshot(memory(snapshot_memory, kSnapshotBytes), kSnapshotBytes, 4 * kPolicy, true),
        replay(kCapacity, 16, 0.6, 3, options),
        storage(kCapacity, {{reinterpret_cast<char*>(columns.obs.data()), 4 * kInputs},
                            {reinterpret_cast<char*>(columns.action.data()), 8},
                            {reinterpret_cast<char*>(columns.reward.data()), 4},
                            {reinterpret_cast<char*>(columns.next.data()), 4 * kInputs},
                            {reinterpret_cast<char*>(columns.discount.data()), 4},
                            {reinterpret_cast<char*>(columns.masks.data()), kActions}}) {
    insert(200);
  }

  static std::size_t grants_size(std::size_t slots) { return SlotQueue::nbytes(slots, 128); }
  static char* memory(std::vector<char>& held, std::size_t nbytes) {
    held = zeroed(nbytes);
    const auto at = reinterpret_cast<std::uintptr_t>(held.data());
    return held.data() + (round_up(at, kCacheLine) - at);
  }
  static char* aligned(std::vector<char>& held) {
    const auto at = reinterpret_cast<std::uintptr_t>(held.data());
    return held.data() + (round_up(at, kCacheLine) - at);
  }
  TrainingLoop::Queues queues() {
    return {&grants, aligned(grants_memory), &done, aligned(done_memory), &snapshot};
  }
  TrainingLoop loop(std::size_t interval, bool prefetch) {
    return {replay, storage, algorithm, kBatch, queues(), {{algorithm.policy.data(), kPolicy}}, interval, prefetch};
  }
  void insert(std::size_t count) {
    Rows rows(count);
    std::vector<std::int64_t> slots(count);
    for (std::size_t i = 0; i < count; ++i) {
      rows.set(i, static_cast<float>(inserted + i));
      slots[i] = static_cast<std::int64_t>((inserted + i) % kCapacity);
    }
    storage.insert(inserted % kCapacity, count,
                   {rows.obs.data(), rows.action.data(), rows.reward.data(), rows.next.data(), rows.discount.data(),
                    rows.masks.data()});
    replay.insert(slots.data(), nullptr, count);
    inserted += count;
  }
  void grant(std::int64_t iterations) {
    const std::int64_t slot = grants.reserve(10.0);
    CHECK(slot >= 0);
    char* at = aligned(grants_memory) + grants.offset(static_cast<std::size_t>(slot));
    const double beta = 0.4;
    std::memcpy(at, &iterations, sizeof iterations);
    std::memcpy(at + 64, &beta, sizeof beta);
    grants.publish(0);
  }
  // Iterations of the next answer.
  std::int64_t answer() {
    const std::int64_t slot = done.peek(10.0);
    CHECK(slot >= 0);
    const char* at = aligned(done_memory) + done.offset(static_cast<std::size_t>(slot));
    std::int64_t iterations;
    double td_error;
    std::memcpy(&iterations, at, sizeof iterations);
    std::memcpy(&td_error, at + 64, sizeof td_error);
    CHECK(td_error == (iterations > 0 ? 2.0 : 0.0));
    done.release();
    return iterations;
  }

  std::vector<char> grants_memory, done_memory, snapshot_memory;
  SlotQueue grants, done;
  Snapshot snapshot;
  Rows columns{kCapacity};
  SumTreeReplay replay;
  ColumnStore storage;
  Recorder algorithm;
  std::size_t inserted = 0;
};

void grants_are_run_and_answered(bool prefetch) {
  Fixture f;
  TrainingLoop loop = f.loop(4, prefetch);
  CHECK(f.snapshot.version() == 1);  // the first policy is out at once
  CHECK(!loop.run_once(0.0));
  f.grant(10);
  f.grant(3);
  CHECK(loop.run_once(1.0) && loop.run_once(1.0) && !loop.run_once(0.0));
  CHECK(f.answer() == 10 && f.answer() == 3);
  CHECK(f.algorithm.steps == 13);
  CHECK(f.snapshot.version() == 4);  // after steps 4, 8 and 12
  float policy[kPolicy];
  f.snapshot.read(policy, 0);
  CHECK(policy[0] == 12.0f);
  CHECK(f.replay.state().counters.updates == 13 * kBatch);
  CHECK(loop.seconds().train > 0.0 && loop.seconds().publish > 0.0);
  std::int64_t slot = 7;
  float priority;
  f.replay.retrieve(&slot, &priority, 1);
  CHECK(priority == 7.25f || priority == 1.0f);  // what the algorithm returned, or never sampled
  loop.restart();
  CHECK(f.snapshot.version() == 5);
  for (const std::uint64_t version : {5, 6}) {  // steps are counted from 0 again: the policy is out after four
    f.grant(version == 5 ? 3 : 1);
    CHECK(loop.run_once(1.0) && f.answer() == (version == 5 ? 3 : 1) && f.snapshot.version() == version);
  }
  f.grants.close();
  CHECK(throws<QueueClosedError>([&] { loop.run_once(1.0); }));
}

void the_newest_events_are_kept(bool prefetch) {
  Fixture f;
  TrainingLoop loop = f.loop(4, prefetch);
  f.grant(3);
  CHECK(loop.run_once(1.0) && loop.events().events().empty());  // none unless asked for
  loop.keep_events(6);
  f.grant(20);
  CHECK(loop.run_once(1.0));
  for (const EventRing* ring : {&loop.events(), &loop.events_ahead()}) {
    const auto events = ring->events();
    if (ring == &loop.events()) CHECK(events.size() == 6);
    if (!prefetch && ring == &loop.events_ahead()) CHECK(events.empty());
    for (std::size_t i = 0; i < events.size(); ++i) {
      CHECK(events[i].end >= events[i].start);
      if (i > 0) CHECK(events[i].start >= events[i - 1].end);
    }
  }
}

void errors_leave_the_window_open(bool prefetch) {
  Fixture f;
  TrainingLoop loop = f.loop(1, prefetch);
  f.algorithm.fail_at = 2;
  f.algorithm.fail_late_at = 4;
  f.grant(5);
  for (int failure = 0; failure < 2; ++failure) {
    CHECK(throws<LearnerError>([&] { loop.run_once(1.0); }));
    CHECK(f.algorithm.trained_last(loop.batch()));
  }
  loop.window().open();
  f.insert(10);
  loop.window().close();
  f.replay.close();
  CHECK(throws<ReplayError>([&] { loop.run_once(1.0); }));  // the grant is still there
  loop.window().open();
  loop.window().close();
}

void what_does_not_fit_is_refused() {
  Fixture f;
  const auto make = [&](SumTreeReplay& replay, std::size_t batch, std::size_t policy, std::size_t interval) {
    const std::vector<Weights> weights = {{f.algorithm.policy.data(), policy}};
    TrainingLoop loop(replay, f.storage, f.algorithm, batch, f.queues(), weights, interval);
  };
  make(f.replay, kBatch, kPolicy, 1);
  SumTreeReplay other(kCapacity + 1, 16, 0.6, 3);
  CHECK(throws<LearnerError>([&] { make(other, kBatch, kPolicy, 1); }));
  CHECK(throws<LearnerError>([&] { make(f.replay, 0, kPolicy, 1); }));
  CHECK(throws<LearnerError>([&] { make(f.replay, kBatch, kPolicy - 1, 1); }));
  CHECK(throws<LearnerError>([&] { make(f.replay, kBatch, kPolicy, 0); }));
  AlignedArray<char> memory(SlotQueue::nbytes(1, 64));
  SlotQueue narrow(memory.data(), memory.size(), 1, 64, true);  // without room for the second field
  for (SlotQueue* TrainingLoop::Queues::* queue : {&TrainingLoop::Queues::grants, &TrainingLoop::Queues::done}) {
    TrainingLoop::Queues queues = f.queues();
    queues.*queue = &narrow;
    CHECK(throws<LearnerError>([&] {
      TrainingLoop(f.replay, f.storage, f.algorithm, kBatch, queues, {{f.algorithm.policy.data(), kPolicy}}, 1);
    }));
  }
  f.algorithm.masked = false;  // a column too many
  CHECK(throws<LearnerError>([&] { make(f.replay, kBatch, kPolicy, 1); }));
}

void the_host_inserts_between_samplings(bool prefetch) {
  Fixture f;
  TrainingLoop loop = f.loop(8, prefetch);
  std::thread thread([&] {
    try {
      for (;;) loop.run_once(1.0);
    } catch (const QueueClosedError&) {
    }
  });
  std::int64_t asked = 0, answered = 0;
  for (int round = 0; round < 60; ++round) {
    f.grant(20);
    asked += 20;
    for (int k = 0; k < 5; ++k) {
      loop.window().open();
      f.insert(17);
      loop.window().close();
    }
    answered += f.answer();
  }
  CHECK(answered == asked);
  f.grants.close();
  thread.join();
  CHECK(f.algorithm.steps == static_cast<std::uint64_t>(asked));
}

void closing_ends_a_grant_early(bool prefetch) {
  Fixture f;
  TrainingLoop loop = f.loop(8, prefetch);
  f.grant(std::int64_t{1} << 40);
  std::thread thread([&] { CHECK(loop.run_once(1.0)); });
  while (f.snapshot.version() < 3) std::this_thread::yield();
  f.grants.close();
  thread.join();
  CHECK(f.answer() == static_cast<std::int64_t>(f.algorithm.steps));
  // What a checkpoint would hold: all that was sampled is trained, and its priorities are those of the Learner.
  CHECK(f.replay.state().counters.updates == f.algorithm.steps * kBatch);
  CHECK(f.replay.state().call == f.algorithm.steps);
}

void batches_drawn_ahead_are_the_same() {
  Fixture plain, ahead;
  for (Fixture* f : {&plain, &ahead}) {
    TrainingLoop loop = f->loop(4, f == &ahead);
    for (const std::int64_t iterations : {1, 2, 60, 0, 100}) {
      f->grant(iterations);
      CHECK(loop.run_once(1.0) && f->answer() == iterations);
      f->insert(70);
    }
  }
  CHECK(plain.algorithm.told == 0 && ahead.algorithm.told == 1 + 59 + 99);  // none beyond the end of a grant
  CHECK(plain.algorithm.items == ahead.algorithm.items && plain.algorithm.weights == ahead.algorithm.weights);
  std::vector<std::int64_t> slots(kCapacity);
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<float> priorities(kCapacity), others(kCapacity);
  plain.replay.retrieve(slots.data(), priorities.data(), kCapacity);
  ahead.replay.retrieve(slots.data(), others.data(), kCapacity);
  CHECK(priorities == others);
  const auto counters = plain.replay.state().counters, same = ahead.replay.state().counters;
  CHECK(counters.updates == same.updates && counters.stale == same.stale);
}

// Refused priorities, and a replay with nothing left to sample, fail after as many steps as without prefetching.
void errors_come_at_the_same_step(bool prefetch) {
  for (const bool runs_out : {false, true}) {
    ReplayOptions options;
    options.max_times_sampled = runs_out ? 2 : 0;
    Fixture f(options);
    f.algorithm.wrong_at = runs_out ? 0 : 12;
    TrainingLoop loop = f.loop(1, prefetch);
    f.grant(13);
    const auto run = [&] { return loop.run_once(1.0); };
    CHECK(runs_out ? throws<ReplayError>(run) : throws<PriorityError>(run));
    CHECK(f.algorithm.steps == 12);  // 200 items twice are 12 batches of 32
    CHECK(f.algorithm.trained_last(loop.batch()));
    const std::uint64_t refused = runs_out ? 0 : 1;
    CHECK(f.replay.state().counters.updates == (12 - refused) * kBatch);
    CHECK(!runs_out || f.snapshot.version() == 13);
    f.insert(200);
    CHECK(run() && f.answer() == 13);  // the grant was still there
  }
}

// While the host blocks sampling, a failure still gets through and the loop can be ended at once.
void failures_get_past_a_busy_host(bool prefetch) {
  Fixture f;
  std::atomic<TrainingLoop*> shown = nullptr;
  std::atomic<bool> over = false;
  std::mutex living;
  std::thread host([&] {
    while (!over) {
      const std::lock_guard lock(living);
      if (shown == nullptr) continue;
      shown.load()->window().open();
      f.insert(3);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      shown.load()->window().close();
    }
  });
  f.grant(std::int64_t{1} << 40);
  for (int failure = 0; failure < 40; ++failure) {
    TrainingLoop loop = f.loop(1, prefetch);
    shown = &loop;
    const std::uint64_t steps = 1 + static_cast<std::uint64_t>(failure % 6), before = f.replay.state().call;
    f.algorithm.fail_late_at = f.algorithm.steps + steps;
    CHECK(throws<LearnerError>([&] { loop.run_once(1.0); }));
    CHECK(f.replay.state().call == before + steps + prefetch);  // nothing is pending
    CHECK(f.algorithm.trained_last(loop.batch()));
    const std::lock_guard lock(living);
    shown = nullptr;
  }
  over = true;
  host.join();
}

void errors_of_drawing_ahead_reach_the_loop() {
  Fixture f;
  TrainingLoop loop = f.loop(1, true);
  f.grant(std::int64_t{1} << 40);
  std::thread closer([&] {
    while (f.snapshot.version() < 10) std::this_thread::yield();
    f.replay.close();
  });
  CHECK(throws<ReplayError>([&] { loop.run_once(1.0); }));
  closer.join();
  loop.window().open();
  loop.window().close();
}

void weights_are_those_of_all_banks() {
  Fixture f;
  f.algorithm.banked = true;
  TrainingLoop loop = f.loop(1, false);
  std::vector<std::int64_t> slots(f.inserted);
  std::iota(slots.begin(), slots.end(), 0);
  // The weights of a batch if all own items have this priority.
  const auto weights = [&](float priority, std::vector<SampledMass> others) {
    const std::vector<float> priorities(slots.size(), priority);
    f.replay.update(slots.data(), priorities.data(), nullptr, slots.size());
    loop.set_banks(std::move(others));
    f.grant(1);
    CHECK(loop.run_once(1.0) && f.answer() == 1);
    return std::vector<float>(f.algorithm.weights.end() - kBatch, f.algorithm.weights.end());
  };
  const auto all = [](double weight) { return std::vector<float>(kBatch, static_cast<float>(weight)); };
  // Three banks with a mass of 2000 together, the empty one without a least; the own one of 200 items with a leaf of 1.
  CHECK(weights(1.0f, {{1800.0, 0.25}, {0.0, 0.0}}) == all(std::pow(0.25, 0.4) * (3.0 * 200.0 / 2000.0)));
  CHECK(weights(1.0f, {{200.0, 4.0}}) == all(1.0));
  CHECK(loop.take_least() == 1.0);
  CHECK(loop.take_least() == std::numeric_limits<double>::infinity());
  CHECK(weights(1.0f, {}) == all(1.0) && weights(4.0f, {}) == all(1.0));
  CHECK(loop.take_least() == 1.0);                   // of both batches
  CHECK(weights(0.0f, {{100.0, 1.0}}) == all(0.0));  // all that is to be learnt is in the other bank
  CHECK(weights(0.0f, {{0.0, 0.0}}) == all(1.0));
}

}  // namespace

int main() {
  for (const bool prefetch : {false, true}) {
    grants_are_run_and_answered(prefetch);
    the_newest_events_are_kept(prefetch);
    errors_leave_the_window_open(prefetch);
    the_host_inserts_between_samplings(prefetch);
    closing_ends_a_grant_early(prefetch);
    errors_come_at_the_same_step(prefetch);
    failures_get_past_a_busy_host(prefetch);
  }
  what_does_not_fit_is_refused();
  weights_are_those_of_all_banks();
  batches_drawn_ahead_are_the_same();
  errors_of_drawing_ahead_reach_the_loop();
}
