#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "pearl/errors.hpp"
#include "pearl/replay_autorun.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace {

using namespace pearl;

constexpr std::size_t kCapacity = 500;
constexpr std::size_t kBatch = 32;

std::vector<std::int64_t> all_slots() {
  std::vector<std::int64_t> slots(kCapacity);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

struct Batch {
  std::vector<std::int64_t> indices = std::vector<std::int64_t>(kBatch);
  std::vector<float> weights = std::vector<float>(kBatch);
  std::vector<std::uint32_t> generations = std::vector<std::uint32_t>(kBatch);
};

void the_thread_gives_what_direct_calls_give() {
  SumTreeReplay direct(kCapacity, 16, 0.6, 3);
  SumTreeReplay served(kCapacity, 16, 0.6, 3);
  ReplayAutorun autorun(served, kBatch, 4);
  autorun.keep_events(100);
  alignas(64) char memory[64] = {};
  Doorbell bell(memory, sizeof memory);
  autorun.attach_bell(&bell);
  const auto slots = all_slots();
  direct.insert(slots.data(), nullptr, kCapacity);
  CHECK(autorun.write_insert(slots.data(), nullptr, kCapacity, 1.0));
  Batch expected;
  Batch found;
  for (int i = 0; i < 500; ++i) {
    direct.sample(kBatch, 0.4, expected.indices.data(), expected.weights.data(), expected.generations.data());
    std::uint32_t seen = bell.value();
    CHECK(autorun.write_sample(kBatch, 0.4, 1.0));
    std::size_t size = 0;
    while ((size = autorun.response_size()) == 0) {
      CHECK(bell.wait(seen, 10.0));
      seen = bell.value();
    }
    CHECK(size == kBatch);
    autorun.take_response(found.indices.data(), found.weights.data(), found.generations.data());
    CHECK(found.indices == expected.indices && found.weights == expected.weights);
    for (std::size_t k = 0; k < kBatch; ++k) found.weights[k] += static_cast<float>(k);
    direct.update(found.indices.data(), found.weights.data(), found.generations.data(), kBatch);
    CHECK(autorun.write_update(found.indices.data(), found.weights.data(), found.generations.data(), kBatch, 1.0));
  }
  CHECK(autorun.drain(10.0));
  CHECK(autorun.pending() == 0);
  CHECK(served.state().total == direct.state().total);
  using Operation = ReplayAutorun::Operation;
  for (const Operation operation : {Operation::kSample, Operation::kUpdate, Operation::kInsert})
    CHECK(autorun.seconds(operation) > 0.0);
  autorun.stop();
  const auto events = autorun.events().events();
  CHECK(events.size() == 100);
  for (std::size_t i = 1; i < events.size(); ++i) CHECK(events[i].start >= events[i - 1].end);
  CHECK(throws<QueueClosedError>([&] { autorun.write_sample(kBatch, 0.4, 0.0); }));
}

void errors_come_back_and_bounds_hold() {
  SumTreeReplay replay(kCapacity, 16, 0.6, 3);
  ReplayAutorun autorun(replay, kBatch, 2);
  CHECK(autorun.write_sample(kBatch, 0.4, 1.0));  // empty
  CHECK(autorun.drain(10.0));
  CHECK(throws<ReplayError>([&] { autorun.response_size(); }));
  CHECK(autorun.response_size() == 0);
  const auto slots = all_slots();
  CHECK(autorun.write_insert(slots.data(), nullptr, kCapacity, 1.0));
  CHECK(autorun.write_sample(kBatch, 0.4, 1.0));
  CHECK(autorun.write_sample(kBatch, 0.4, 1.0));
  CHECK(throws<QueueTimeoutError>([&] { autorun.write_sample(kBatch, 0.4, 0.0); }));
  const float negative[] = {-1.0f};
  CHECK(throws<PriorityError>([&] { autorun.write_update(slots.data(), negative, nullptr, 1, 0.0); }));
  const std::int64_t outside[] = {static_cast<std::int64_t>(kCapacity)};
  CHECK(throws<ReplayError>([&] { autorun.write_insert(outside, nullptr, 1, 0.0); }));
  const float one[] = {1.0f};
  CHECK(throws<ReplayError>([&] { autorun.write_update(outside, one, nullptr, 1, 0.0); }));
}

void the_first_error_comes_back_and_rings_the_bell() {
  SumTreeReplay replay(kCapacity, 16, 0.6, 3);
  ReplayAutorun autorun(replay, kBatch, 2);
  alignas(64) char memory[64] = {};
  Doorbell bell(memory, sizeof memory);
  autorun.attach_bell(&bell);
  const float priority[] = {1.0f};
  for (const std::int64_t never_written : {std::int64_t{3}, std::int64_t{4}})
    CHECK(autorun.write_update(&never_written, priority, nullptr, 1, 10.0));
  CHECK(bell.wait(0, 10.0) && autorun.drain(10.0));
  std::string message;
  try {
    autorun.response_size();
  } catch (const ReplayError& error) {
    message = error.what();
  }
  CHECK(message.find("Index 3 ") == 0);
  CHECK(autorun.response_size() == 0);
}

void a_request_has_nothing_of_the_one_before_it() {
  SumTreeReplay replay(kCapacity, 16, 0.6, 3);
  ReplayAutorun autorun(replay, kBatch, 1);  // one slot for all requests
  const auto slots = all_slots();
  const float five[] = {5.0f}, three[] = {3.0f};
  const std::uint32_t outdated[] = {~0u};
  CHECK(autorun.write_insert(slots.data(), nullptr, kCapacity, 10.0));
  CHECK(autorun.write_update(slots.data(), three, outdated, 1, 10.0));
  CHECK(autorun.write_update(slots.data(), five, nullptr, 1, 10.0));
  CHECK(autorun.write_insert(slots.data() + 1, three, 1, 10.0));
  CHECK(autorun.write_insert(slots.data() + 2, nullptr, 1, 10.0));  // at the largest priority so far
  CHECK(autorun.drain(10.0));
  float priorities[3];
  replay.retrieve(slots.data(), priorities, 3);
  CHECK(priorities[0] == 5.0f && priorities[1] == 3.0f && priorities[2] == 5.0f);
}

}  // namespace

int main() {
  the_thread_gives_what_direct_calls_give();
  errors_come_back_and_bounds_hold();
  the_first_error_comes_back_and_rings_the_bell();
  a_request_has_nothing_of_the_one_before_it();
}
