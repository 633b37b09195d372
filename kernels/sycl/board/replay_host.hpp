// Requests to a generated Replay Manager, and a plain search that computes their expected answers.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "host.hpp"

inline constexpr std::uint64_t kSeed = 7;
inline constexpr double kBeta = 0.5;

class ReplayHost {
 public:
  ReplayHost(Board& board, std::uint32_t most)
      : feeding_(board.queue()),
        collecting_(board.queue()),
        command_(board.memory<Command>(1)),
        summary_(board.memory<Summary>(1)),
        items(board.memory<Item>(most)),
        held(board.memory<Held>(most)),
        weights(board.memory<float>(most)) {}

  // Waits for the answer: emulators may run two launches of one kernel at once, which pipes do not allow.
  const Summary& request(Operation operation, std::uint64_t count, std::uint64_t call = 0,
                         LearnerContext* context = nullptr) {
    Command* const command = command_;
    *command = Command{};
    command->operation = operation;
    command->count = count;
    command->seed = kSeed;
    command->call = call;
    command->stratified = true;
    command->checked = command->trains = context != nullptr;
    command->scale = pearl::kDefaultScale;
    command->alpha_q28 = pearl::exponent_q28(1.0);
    command->beta_q28 = pearl::exponent_q28(kBeta);
    const Item* const given = items;
    Held* const answered = held;
    float* const weighed = weights;
    Summary* const summary = summary_;
    feeding_.single_task<pearl_replay_feed_kernel>([=] { pearl_replay_feed(command, given, context); });
    collecting_
        .single_task<pearl_replay_collect_kernel>(
            [=] { pearl_replay_collect(command, answered, weighed, summary, context); })
        .wait();
    feeding_.wait();
    return *summary_;
  }

 private:
  sycl::queue feeding_, collecting_;
  Command* command_;
  Summary* summary_;

 public:
  Item* items;
  Held* held;
  float* weights;
};

// The leaves alone.
class PlainReplay {
 public:
  explicit PlainReplay(std::uint32_t slots) : leaves_(slots) {}

  void set(std::uint32_t slot, float priority) {
    leaves_[slot] = pearl::quantise(priority, pearl::exponent_q28(1.0), pearl::kDefaultScale);
  }
  std::uint64_t total() const {
    return std::accumulate(leaves_.begin(), leaves_.end(), std::uint64_t{0});
  }
  // The slots that call number `call` draws.
  std::vector<std::uint32_t> sample(std::uint64_t call, std::uint32_t count) const {
    std::vector<std::uint64_t> ends(leaves_.size());
    std::partial_sum(leaves_.begin(), leaves_.end(), ends.begin());
    std::vector<std::uint32_t> slots;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t random = pearl::uniform_at(kSeed, call, i, count > 1 ? pearl::stratum_width(count) : 0);
      const auto found = std::upper_bound(ends.begin(), ends.end(), pearl::mulhi64(random, ends.back()));
      slots.push_back(static_cast<std::uint32_t>(found - ends.begin()));
    }
    return slots;
  }
  // Importance weights of a batch.
  std::vector<double> weights(const std::vector<std::uint32_t>& slots) const {
    std::uint64_t smallest = ~std::uint64_t{0};
    for (const std::uint32_t slot : slots) smallest = std::min(smallest, leaves_[slot]);
    std::vector<double> found;
    for (const std::uint32_t slot : slots)
      found.push_back(std::pow(static_cast<double>(smallest) / static_cast<double>(leaves_[slot]), kBeta));
    return found;
  }

 private:
  std::vector<std::uint64_t> leaves_;
};

// Fills the tree with priorities above 0.
inline void fill(ReplayHost& replay, PlainReplay& plain, std::uint32_t slots, Verdict& verdict) {
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    const float priority = static_cast<float>(slot % 100 + 1) / 64.0f;
    replay.items[slot] = Item{0, slot, std::bit_cast<std::uint32_t>(priority), slot + 1};
    plain.set(slot, priority);
  }
  const Summary& summary = replay.request(Operation::insert, slots);
  verdict.require(summary.change == plain.total() && summary.added == slots, "the total of what was inserted");
}
