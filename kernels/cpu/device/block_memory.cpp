#include "pearl/device/block_memory.hpp"

#include <algorithm>
#include <cstdint>

#include "pearl/device/portable.hpp"

namespace pearl::device {
namespace {

using tape::Instruction;
using tape::kNone;
using tape::Operation;

constexpr std::size_t kLine = 32;  // floats: one of each bank of the memory

std::size_t in_lines(std::size_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// The memory that the matrix of an instruction takes; 0 if it cannot be copied by fours.
std::size_t floats_of(const Instruction& i, std::size_t blocks) {
  const bool forward = i.operation == Operation::linear;
  if (!forward && i.operation != Operation::slope_linear) return 0;
  if (i.weight % 4 != 0 || (forward ? i.in_width : i.out_width) % 4 != 0) return 0;
  const auto share = static_cast<std::size_t>(share_of(i.out_width, static_cast<int>(blocks)));
  const std::size_t biases = forward && i.bias != kNone ? share : 0;
  return in_lines(share * static_cast<std::size_t>(i.in_width) + biases);
}

// A matrix in the memory, from when it is loaded to its last use.
struct Held {
  const Instruction* loader;
  std::size_t begin, end;  // floats
  std::size_t last;        // the last instruction that reads it
};

// Whether the matrix loaded for one instruction serves another one.
bool serves(const Instruction& loader, const Instruction& i, std::size_t blocks) {
  const bool has_share = loader.operation == i.operation || (blocks == 1 && loader.operation == Operation::linear);
  return has_share && loader.parameters == i.parameters && loader.weight == i.weight;
}

// `features`: the values before the matrices. Returns the end of the memory that is used.
std::size_t plan_tape(std::vector<Instruction>& tape, std::size_t blocks, std::size_t features, std::size_t floats) {
  const std::size_t first = in_lines(features * tape::kLanes);
  std::vector<Held> held;                         // the newest last
  std::vector<std::size_t> start(tape.size(), 0);  // when the memory of an instruction's matrix is free
  std::size_t next = first, most = first;
  std::int32_t loads = 0;
  for (std::size_t k = 0; k < tape.size(); ++k) {
    Instruction& i = tape[k];
    const std::size_t wanted = floats_of(i, blocks);
    if (wanted == 0 || first + wanted > floats || static_cast<std::size_t>(i.in_width) > features) continue;
    const auto there =
        std::find_if(held.begin(), held.end(), [&](const Held& h) { return serves(*h.loader, i, blocks); });
    if (there != held.end()) {
      there->last = k;
      i.held = there->loader->held;
      i.loads = there->loader->loads;
      continue;
    }
    if (next + wanted > floats) next = first;
    const std::size_t begin = next, end = begin + wanted;
    for (const Held& h : held)
      if (h.begin < end && begin < h.end) start[k] = std::max(start[k], h.last + 1);
    std::erase_if(held, [&](const Held& h) { return h.begin < end && begin < h.end; });
    i.held = static_cast<std::int32_t>(begin);
    i.flags |= tape::kLoads;
    i.loads = ++loads;
    held.push_back({&i, begin, end, k});
    next = end;
    most = std::max(most, end);
  }
  std::size_t ahead = 0;
  for (std::size_t k = 0; k < tape.size(); ++k) {
    while (ahead < tape.size() && start[ahead] <= k) ++ahead;
    tape[k].ahead = static_cast<std::int32_t>(ahead);
  }
  return most;
}

}  // namespace

BlockMemory plan_block_memory(const std::vector<std::vector<Instruction>*>& tapes, std::size_t arena, std::size_t blocks,
                              std::size_t bytes) {
  const std::size_t floats = bytes / sizeof(float);
  std::size_t largest = 0, widest = 0;
  for (const std::vector<Instruction>* tape : tapes)
    for (const Instruction& i : *tape) {
      const std::size_t wanted = floats_of(i, blocks), in = static_cast<std::size_t>(i.in_width);
      if (wanted == 0 || in_lines(in * tape::kLanes) + wanted > floats) continue;
      largest = std::max(largest, wanted);
      widest = std::max(widest, in);
    }
  if (largest == 0) return {};
  // Two of the largest matrices: one is loaded while the other is used.
  const bool all = blocks == 1 && arena * tape::kLanes + 2 * largest <= floats;
  BlockMemory plan{all ? arena : widest};
  for (std::vector<Instruction>* tape : tapes)
    plan.bytes = std::max(plan.bytes, plan_tape(*tape, blocks, plan.features, floats) * sizeof(float));
  return plan;
}

}  // namespace pearl::device
