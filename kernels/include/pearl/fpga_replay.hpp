// The Replay Manager as a pipeline on an FPGA (PEARL Sec. V-A, Fig. 6; CF'22 Sec. 3.1): one stage for each level of the
// sum tree, with that level's nodes in its on-chip memory. A request passes all levels from the root to the leaves, so
// as many requests are in flight as there are levels.
//
//   feed -> level 0 (root) -> level 1 -> ... -> level depth (leaves) -> collect
//              ^------------------ changes --------------'
//
// An update takes two passes, as in the paper: the first writes the leaf and sends the difference back to the root; the
// second adds the difference to all levels on the way down. Items of a batch go through both in order: the last of
// duplicates wins. A request after an update waits at the root until the update's second pass has started.
//
// A leaf has 28 bits, each level above log2(fanout) more: sums never overflow and are exact.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pearl/fpga_pipes.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"

namespace pearl::fpga {

inline constexpr unsigned kLeafBits = 28;
inline constexpr std::uint32_t kSiblings = 16;  // that a search reads at once
inline constexpr std::uint32_t kTimesMax = (1u << 16) - 1;  // where counting samples of one item stops

enum class Operation : std::uint8_t {
  sample,    // value: the random number; then, below the root, the target
  visit,     // the slot is drawn already
  update,    // value: the new leaf
  insert,    // the same, of a new item
  add,       // second pass: value is added to the sums above the slot
  retrieve,  // what the slot holds
  load,      // value: of node `slot` at `level`; at the leaves, times sampled in the upper half
  stop,
};

// A request on its way through the levels. Slot and node numbers have 32 bits.
struct Request {
  std::uint64_t value;
  std::uint32_t slot;
  std::uint32_t priority;  // bits of a float
  std::uint32_t generation;
  Operation operation;
  std::uint8_t level;  // of what is loaded
  bool last;           // of its batch
  bool checked;        // do not update if the generation differs
};

enum class Outcome : std::uint32_t {
  applied,
  added,    // the slot was written for the first time
  dropped,  // stale, or never written
};

// The leaves' answer to each request except `add` and `load`.
struct Answer {
  std::uint64_t change;  // of the leaf, modulo 2^64
  std::uint32_t slot;
  std::uint32_t leaf;  // before the change
  std::uint32_t priority;
  std::uint32_t generation;
  std::uint32_t times;
  Outcome outcome;
};

// A leaf's message back to the root.
struct Change {
  std::uint64_t value;
  std::uint32_t slot;
};

// A request of the host.
struct Command {
  Operation operation;
  std::uint8_t level;
  bool checked;
  bool stratified;
  bool trains;  // setting 2: samples go to the Learner, updates come from it
  std::int32_t scale;
  std::uint64_t count;
  std::uint64_t seed;
  std::uint64_t call;
  std::int64_t alpha_q28;
  std::int64_t beta_q28;
  float epsilon;  // added to the Learner's priorities; the host's already include it
};

// One item of a command, in host memory.
struct Item {
  std::uint64_t value;
  std::uint32_t slot;
  std::uint32_t priority;
  std::uint32_t generation;
};

// The results that `collect` writes to host memory, next to `weights`: one per item of the command.
struct Held {
  std::uint32_t slot;
  std::uint32_t leaf;
  std::uint32_t priority;
  std::uint32_t generation;
  std::uint32_t times;
};

struct Summary {
  std::uint64_t change;    // of the total
  std::uint64_t large;     // change of the sum of large() of all leaves, modulo 2^64
  std::uint64_t applied;   // updates and inserts
  std::uint64_t added;     // slots that had never been written
  std::uint64_t infinite;  // of those applied
  std::uint32_t highest;   // finite priority of those applied
};

// Nodes of a level whose nodes have 2^bits slots below each.
constexpr std::uint32_t tree_nodes(std::uint32_t capacity, unsigned bits) {
  return static_cast<std::uint32_t>((capacity + (std::uint64_t{1} << bits) - 1) >> bits);
}

// A tree of `depth` levels below its root.
template <std::uint32_t capacity, unsigned shift, unsigned depth>
struct Tree {
  static constexpr unsigned kShift = shift;
  static constexpr unsigned kDepth = depth;
  static constexpr std::uint32_t kFanout = 1u << shift;
  static constexpr unsigned bits(unsigned level) { return kLeafBits + shift * (depth - level); }
  // Families are whole.
  static constexpr std::uint32_t nodes(unsigned level) {
    return (tree_nodes(capacity, shift * (depth - level)) + kFanout - 1) / kFanout * kFanout;
  }
};

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)

// Level 0: a register. At most `most` updates are in flight, as many as `Changes` holds, so that the leaves never wait.
template <class Shape, int most, class In, class Changes, class Down>
void root_stage() {
  Word<Shape::bits(0)> total = 0;
  int in_flight = 0;
  const auto second_pass = [&] {
    const Change change = Changes::read();
    --in_flight;
    total += static_cast<Word<Shape::bits(0)>>(change.value);
    Request add{};
    add.operation = Operation::add;
    add.slot = change.slot;
    add.value = change.value;
    Down::write(add);
  };
  while (true) {
    Request request = In::read();
    if (request.operation == Operation::update || request.operation == Operation::insert) {
      if (in_flight == most) second_pass();
      Down::write(request);
      ++in_flight;
      if (!request.last) continue;
      while (in_flight > 0) second_pass();
      continue;
    }
    if (request.operation == Operation::load && request.level == 0) {
      total = static_cast<Word<Shape::bits(0)>>(request.value);
      continue;
    }
    if (request.operation == Operation::sample) {
      request.value = mulhi64(request.value, static_cast<std::uint64_t>(total));
      request.slot = 0;
    }
    Down::write(request);
    if (request.operation == Operation::stop) return;
  }
}

// `pick` of pearl/quantise.hpp among `fanout` siblings, up to kSiblings in each iteration.
template <std::uint32_t fanout, class Node>
std::uint32_t search(const Node* siblings, std::uint64_t& target) {
  constexpr std::uint32_t kLanes = fanout < kSiblings ? fanout : kSiblings;
  std::uint64_t sum = 0, before = 0;
  std::uint32_t passed = 0;
  for (std::uint32_t first = 0; first < fanout; first += kLanes) {
#pragma unroll
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      if (first + lane + 1 == fanout) break;  // the last sibling is what remains
      sum += static_cast<std::uint64_t>(siblings[first + lane]);
      const bool beyond = sum <= target;
      before = beyond ? sum : before;
      passed += beyond;
    }
  }
  target -= before;
  return passed;
}

// A level between the root and the leaves.
template <class Shape, unsigned level, class In, class Down>
void inner_stage() {
  using Node = Word<Shape::bits(level)>;
  constexpr std::uint32_t kNodes = Shape::nodes(level);
  constexpr unsigned kBelow = Shape::kShift * (Shape::kDepth - level);
  Node nodes[kNodes];
  for (std::uint32_t i = 0; i < kNodes; ++i) nodes[i] = 0;
  while (true) {
    Request request = In::read();
    if (request.operation == Operation::load && request.level == level) {
      nodes[request.slot] = static_cast<Node>(request.value);
      continue;
    }
    if (request.operation == Operation::sample) {
      const std::uint32_t child = request.slot << Shape::kShift;
      request.slot = child + search<Shape::kFanout>(nodes + child, request.value);
    } else if (request.operation == Operation::add) {
      nodes[request.slot >> kBelow] += static_cast<Node>(request.value);
      if (level + 1 == Shape::kDepth) continue;  // the first pass wrote the leaf
    }
    Down::write(request);
    if (request.operation == Operation::stop) return;
  }
}

// The leaves, and the other data of each slot.
template <class Shape, class In, class Changes, class Out>
void leaf_stage() {
  constexpr std::uint32_t kSlots = Shape::nodes(Shape::kDepth);
  Word<kLeafBits> leaves[kSlots];
  std::uint32_t priorities[kSlots];
  std::uint32_t generations[kSlots];  // 0: never written
  std::uint16_t times[kSlots];        // sampled since written
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    leaves[i] = 0;
    priorities[i] = 0;
    generations[i] = 0;
    times[i] = 0;
  }
  while (true) {
    Request request = In::read();
    if (request.operation == Operation::add) continue;  // comes here only if there is no inner level
    if (request.operation == Operation::sample) {
      const std::uint32_t child = request.slot << Shape::kShift;
      request.slot = child + search<Shape::kFanout>(leaves + child, request.value);
    }
    const std::uint32_t slot = request.slot;
    Answer answer{};
    answer.slot = slot;
    const std::uint32_t leaf = static_cast<std::uint32_t>(leaves[slot]);
    answer.leaf = leaf;
    const std::uint32_t generation = generations[slot];
    const std::uint32_t sampled = times[slot];
    switch (request.operation) {
      case Operation::load:
        leaves[slot] = static_cast<Word<kLeafBits>>(request.value);
        priorities[slot] = request.priority;
        generations[slot] = request.generation;
        times[slot] = static_cast<std::uint16_t>(request.value >> 32);
        continue;
      case Operation::sample:
      case Operation::visit:
        if (sampled < kTimesMax) times[slot] = static_cast<std::uint16_t>(sampled + 1);
        break;
      case Operation::update:
        if (generation == 0 || (request.checked && request.generation != generation))
          answer.outcome = Outcome::dropped;
        break;
      case Operation::insert:
        answer.outcome = generation == 0 ? Outcome::added : Outcome::applied;
        generations[slot] = request.generation;
        times[slot] = 0;
        break;
      default:
        break;
    }
    if (request.operation == Operation::update || request.operation == Operation::insert) {
      if (answer.outcome != Outcome::dropped) {
        answer.change = request.value - leaf;
        answer.priority = request.priority;
        leaves[slot] = static_cast<Word<kLeafBits>>(request.value);
        priorities[slot] = request.priority;
      }
      Changes::write(Change{answer.change, slot});
    } else {
      answer.priority = priorities[slot];
      answer.generation = generation;
      answer.times = sampled;
    }
    Out::write(answer);
    if (request.operation == Operation::stop) return;
  }
}

// Turns a command in host memory into requests. In setting 2, `Learner` sends the updates (pearl/fpga_training.hpp).
template <class Out, class Learner>
void feed(const Command& command, const Item* items, LearnerContext* context) {
  if constexpr (!std::is_same_v<Learner, None>)
    if (command.trains && command.operation == Operation::update)
      return Learner::template update<Out>(command, context);
  const std::uint64_t count = command.count;
  const std::uint64_t width = command.stratified && count > 1 ? stratum_width(count) : 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    Request request{};
    request.operation = command.operation;
    request.level = command.level;
    request.checked = command.checked;
    request.last = i + 1 == count;
    if (command.operation == Operation::sample) {
      request.value = uniform_at(command.seed, command.call, i, width);
    } else {
      const Item item = items[i];
      request.slot = item.slot;
      request.priority = item.priority;
      request.generation = item.generation;
      request.value = item.value;
      if (command.operation == Operation::update || command.operation == Operation::insert)
        request.value = quantise(std::bit_cast<float>(item.priority), command.alpha_q28, command.scale);
    }
    Out::write(request);
  }
}

// Writes the answers to a command, and the weights of samples, to host memory. In setting 2 also sends samples to the
// `Learner`: items at once, weights at the end, since they depend on the whole batch.
template <class In, class Learner>
void collect(const Command& command, Held* held, float* weights, Summary* summary, const LearnerContext* context) {
  constexpr bool kTrains = !std::is_same_v<Learner, None>;
  Summary found{};
  if constexpr (kTrains) {
    if (command.operation == Operation::stop) Learner::stop();
    if (command.trains && command.operation != Operation::update) Learner::begin(context);
  }
  std::uint32_t smallest = kLeafMax;
  for (std::uint64_t i = 0; i < command.count; ++i) {
    const Answer answer = In::read();
    if (command.operation == Operation::update || command.operation == Operation::insert) {
      found.change += answer.change;
      found.large += large(answer.leaf + static_cast<std::uint32_t>(answer.change));
      found.large -= large(answer.leaf);
      found.applied += answer.outcome != Outcome::dropped;
      found.added += answer.outcome == Outcome::added;
      found.infinite += answer.priority == kInfinityBits;
      if (answer.priority < kInfinityBits && answer.priority > found.highest) found.highest = answer.priority;
    } else {
      held[i] = Held{answer.slot, answer.leaf, answer.priority, answer.generation, answer.times};
      if (answer.leaf < smallest) smallest = answer.leaf;
      if constexpr (kTrains)
        if (command.trains) Learner::send(context, i, answer.slot, answer.generation);
    }
  }
  if (command.operation == Operation::sample) {
    const std::int64_t log2_smallest = log2_q32(smallest);
    for (std::uint64_t i = 0; i < command.count; ++i)
      weights[i] = importance_weight(log2_smallest, log2_q32(held[i].leaf), command.beta_q28);
  }
  if constexpr (kTrains)
    if (command.trains && command.operation != Operation::update)
      for (std::uint64_t i = 0; i < command.count; ++i)
        Learner::weigh(i, command.operation == Operation::sample ? weights[i] : 1.0f);
  *summary = found;
}

#endif

}  // namespace pearl::fpga
