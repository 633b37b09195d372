// The Replay Manager as a pipeline on an FPGA (PEARL Sec. V-A, Fig. 6; CF'22 Sec. 3.1): one stage for each level of the
// sum tree, which alone holds that level's nodes, in on-chip memory. A request passes all levels from the root to the
// leaves and each does its part, so that as many requests are under way as there are levels.
//
//   feed -> level 0 (root) -> level 1 -> ... -> level depth (leaves) -> collect
//              ^------------------ changes --------------'
//
// An update is two passes, as in the paper: the first leaves the new priority in its leaf and gives what that changes,
// which comes back to the root; the second adds it on the way down. Items of a batch follow one another through both,
// so that of duplicates the last wins. What comes after an update waits at the root until its second pass is on its
// way.
//
// A node has 28 bits at the leaves and log2(fanout) more at each level above, which no sum exceeds: integers, exact.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pearl/fpga_pipes.hpp"
#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"

namespace pearl::fpga {

inline constexpr unsigned kLeafBits = 28;
inline constexpr std::uint32_t kTimesMax = (1u << 16) - 1;  // samples of one item, where counting stops
inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;

enum class Operation : std::uint8_t {
  sample,    // value: the random number; then, below the root, the target
  visit,     // the slot is drawn already
  update,    // value: the new leaf
  insert,    // the same, of a new item
  add,       // second pass: value is added to the sums above the slot
  retrieve,  // what the slot holds
  load,      // value: that of node `slot` at `level`; at the leaves, times sampled stand above it
  stop,
};

// What passes through the levels. Slots and nodes have 32 bits.
struct Request {
  std::uint64_t value;
  std::uint32_t slot;
  std::uint32_t priority;  // bits of a float
  std::uint32_t generation;
  Operation operation;
  std::uint8_t level;  // of what is loaded
  bool last;           // of its batch
  bool checked;        // nothing is updated where the generation is another
};

enum class Outcome : std::uint32_t {
  applied,
  added,    // the slot was written for the first time
  dropped,  // stale, or never written
};

// What the leaves answer, one for each request but `add` and `load`.
struct Answer {
  std::uint64_t change;  // of the leaf, modulo 2^64
  std::uint32_t slot;
  std::uint32_t leaf;  // before the change
  std::uint32_t priority;
  std::uint32_t generation;
  std::uint32_t times;
  Outcome outcome;
};

// What a leaf tells the root.
struct Change {
  std::uint64_t value;
  std::uint32_t slot;
};

// What the host asks for.
struct Command {
  Operation operation;
  std::uint8_t level;
  bool checked;
  bool stratified;
  bool trains;  // setting 2: what is sampled goes to the Learner, updates come from there
  std::int32_t scale;
  std::uint64_t count;
  std::uint64_t seed;
  std::uint64_t call;
  std::int64_t alpha_q28;
  std::int64_t beta_q28;
  float epsilon;  // added to priorities that come from the Learner; the host's have it already
};

// One item of a command, in host memory.
struct Item {
  std::uint64_t value;
  std::uint32_t slot;
  std::uint32_t priority;
  std::uint32_t generation;
};

// What `collect` leaves in host memory; `held` and `weights` have as many items as the command.
struct Held {
  std::uint32_t slot;
  std::uint32_t leaf;
  std::uint32_t priority;
  std::uint32_t generation;
  std::uint32_t times;
};

struct Summary {
  std::uint64_t change;    // of the total
  std::uint64_t large;     // by what the sum of large() of all leaves changes, modulo 2^64
  std::uint64_t applied;   // updates and inserts
  std::uint64_t added;     // slots that had never been written
  std::uint64_t infinite;  // of those applied
  std::uint32_t highest;   // finite priority of those applied
};

// Nodes of a level each of which has 2^bits slots below it.
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

// The first of `fanout` siblings whose inclusive prefix sum exceeds the target, from which those before it are taken.
template <class Node>
std::uint32_t pick(const Node* siblings, std::uint32_t fanout, std::uint64_t& target) {
  std::uint64_t sum = 0, before = 0;
  std::uint32_t passed = 0;
  for (std::uint32_t k = 0; k + 1 < fanout; ++k) {
    sum += static_cast<std::uint64_t>(siblings[k]);
    const bool beyond = sum <= target;
    before = beyond ? sum : before;
    passed += beyond;
  }
  target -= before;
  return passed;
}

// Level 0: a register. It has at most as many updates under way as `Changes` takes, so that the leaves never wait.
template <class Shape, int most, class In, class Changes, class Down>
void root_stage() {
  Word<Shape::bits(0)> total = 0;
  int under_way = 0;
  const auto second_pass = [&] {
    const Change change = Changes::read();
    --under_way;
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
      if (under_way == most) second_pass();
      Down::write(request);
      ++under_way;
      if (!request.last) continue;
      while (under_way > 0) second_pass();
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
      request.slot = child + pick(nodes + child, Shape::kFanout, request.value);
    } else if (request.operation == Operation::add) {
      nodes[request.slot >> kBelow] += static_cast<Node>(request.value);
      if (level + 1 == Shape::kDepth) continue;  // the leaf has it
    }
    Down::write(request);
    if (request.operation == Operation::stop) return;
  }
}

// The leaves, and what else is known of a slot.
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
    if (request.operation == Operation::add) continue;  // where no level lies between
    if (request.operation == Operation::sample) {
      const std::uint32_t child = request.slot << Shape::kShift;
      request.slot = child + pick(leaves + child, Shape::kFanout, request.value);
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

// Turns a command in host memory into requests. `Learner` has the updates of setting 2 (pearl/fpga_training.hpp).
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

// Puts the answers to a command into host memory, with the weights of what was sampled, and in setting 2 gives what was
// sampled to the `Learner`: items at once, their weights, which depend on all of them, at the end.
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
