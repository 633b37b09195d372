#include "pearl/device/block_memory.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "pearl/device/portable.hpp"

namespace {

using namespace pearl::device;
using pearl::tape::Instruction;
using pearl::tape::kLoads;
using pearl::tape::kNone;
using pearl::tape::Operation;
using Tape = std::vector<Instruction>;

struct Problem {
  Tape tape;
  std::size_t arena = 0;
};

// A forward pass of two vectors' networks, and one back through the second, as tapes are.
Problem problem_of(const std::vector<int>& widths) {
  Problem problem;
  const auto add = [&](Operation operation, int parameters, std::int64_t weight, int in, int out) {
    Instruction i{.operation = operation, .in_width = in, .out_width = out, .parameters = parameters, .weight = weight};
    if (operation == Operation::linear) i.bias = weight + 16'000'000;
    problem.arena += static_cast<std::size_t>(in + out);
    problem.tape.push_back(i);
  };
  for (int vector = 0; vector < 2; ++vector) {
    add(Operation::load, 0, kNone, 0, widths[0]);
    for (std::size_t layer = 1; layer < widths.size(); ++layer)
      add(Operation::linear, vector, static_cast<std::int64_t>(layer) * 100'000, widths[layer - 1], widths[layer]);
  }
  for (std::size_t layer = widths.size() - 1; layer > 1; --layer)
    add(Operation::slope_linear, 1, static_cast<std::int64_t>(layer) * 100'000, widths[layer], widths[layer - 1]);
  return problem;
}

std::size_t matrix_floats(const Instruction& i, std::size_t blocks) {
  const auto in = static_cast<std::size_t>(i.in_width);
  const auto share = static_cast<std::size_t>(share_of(i.out_width, static_cast<int>(blocks)));
  return share * in + (i.operation == Operation::linear ? share : 0);
}

// Runs a planned tape: what is loaded when, and whether each instruction finds its matrix, whole.
void check_run(const Tape& tape, const BlockMemory& memory, std::size_t blocks) {
  std::vector<std::int64_t> holder(memory.bytes / sizeof(float), -1);  // whose matrix each float is of
  std::vector<std::size_t> loaders;                                    // the instructions of the loads, in their order
  std::size_t started = 0;
  for (std::size_t k = 0; k < tape.size(); ++k) {
    const Instruction& i = tape[k];
    if (memory.bytes == 0) {
      CHECK(i.held == kNone && i.flags == 0);
      continue;
    }
    CHECK(i.ahead > static_cast<std::int32_t>(k));
    for (; started < static_cast<std::size_t>(i.ahead); ++started) {
      const Instruction& loaded = tape[started];
      if ((loaded.flags & kLoads) == 0) continue;
      loaders.push_back(started);
      CHECK(loaded.loads == static_cast<std::int32_t>(loaders.size()));
      CHECK(loaded.held % 4 == 0);
      const auto begin = static_cast<std::size_t>(loaded.held), count = matrix_floats(loaded, blocks);
      CHECK(begin >= memory.features * pearl::tape::kLanes && begin + count <= holder.size());
      std::fill_n(holder.begin() + loaded.held, count, static_cast<std::int64_t>(started));
    }
    if (i.held == kNone) continue;
    CHECK(memory.features >= static_cast<std::size_t>(i.in_width));
    CHECK(i.loads >= 1 && static_cast<std::size_t>(i.loads) <= loaders.size());
    const std::size_t loader = loaders[static_cast<std::size_t>(i.loads) - 1];
    const Instruction& loaded = tape[loader];
    CHECK(loaded.weight == i.weight && loaded.parameters == i.parameters);
    CHECK(loaded.operation == i.operation || (blocks == 1 && loaded.operation == Operation::linear));
    CHECK(loaded.held == i.held);
    const auto needed = holder.begin() + i.held;
    CHECK(std::all_of(needed, needed + static_cast<std::ptrdiff_t>(matrix_floats(i, blocks)),
                      [&](std::int64_t held) { return held == static_cast<std::int64_t>(loader); }));
  }
}

void each_instruction_finds_its_matrix() {
  std::mt19937 random(1);
  bool kept_all = false, reused = false, again = false, without = false, some = false;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<int> widths(2 + random() % 4);
    for (int& width : widths) width = 1 + static_cast<int>(random() % 150);
    if (random() % 2 != 0)
      for (int& width : widths) width = (width + 3) / 4 * 4;
    Problem problem = problem_of(widths), other = problem_of({8, 12, 4});
    const std::size_t blocks = std::size_t{1} << random() % 4, bytes = random() % 200'000;
    const std::size_t arena = std::max(problem.arena, other.arena);
    const BlockMemory memory = plan_block_memory({&problem.tape, &other.tape}, arena, blocks, bytes);
    CHECK(memory.bytes <= bytes);
    check_run(problem.tape, memory, blocks);
    check_run(other.tape, memory, blocks);
    int loads = 0, held = 0, last = 0, could = 0;
    for (const Instruction& i : problem.tape) {
      loads += (i.flags & kLoads) != 0;
      held += i.held != kNone;
      could += i.weight != kNone && (i.operation == Operation::linear ? i.in_width : i.out_width) % 4 == 0;
      if ((i.flags & kLoads) == 0) continue;
      again |= i.held < last;
      last = i.held;
    }
    kept_all |= memory.features == arena;
    reused |= held > loads;
    without |= memory.bytes == 0;
    some |= held > 0 && held < could;
  }
  CHECK(kept_all && reused && again && without && some);
}

void small_networks_lie_in_memory_whole() {
  Problem problem = problem_of({4, 64, 64, 2});
  const BlockMemory memory = plan_block_memory({&problem.tape}, problem.arena, 1, 200'000);
  CHECK(memory.features == problem.arena);
  for (const Instruction& i : problem.tape) CHECK(i.ahead == static_cast<std::int32_t>(problem.tape.size()));
  CHECK(problem.tape.back().loads == 5);  // the pass back uses what the pass before it loaded
}

void matrices_that_are_not_of_fours_stay_where_they_are() {
  Problem problem = problem_of({3, 64, 64, 64, 2});
  problem.tape[3].weight += 2;
  plan_block_memory({&problem.tape}, problem.arena, 2, 200'000);
  CHECK(problem.tape[1].held == kNone);
  CHECK(problem.tape[2].held != kNone);
  CHECK(problem.tape[3].held == kNone);
}

}  // namespace

int main() {
  each_instruction_finds_its_matrix();
  small_networks_lie_in_memory_whole();
  matrices_that_are_not_of_fours_stay_where_they_are();
}
