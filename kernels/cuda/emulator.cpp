#include "emulator.hpp"

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pearl/errors.hpp"

namespace pearl::emulator {

thread_local const Here* here = nullptr;

namespace {

constexpr std::size_t kStackBytes = std::size_t{128} << 10;
constexpr unsigned kWarp = 32;

enum class State { ready, at_barrier, at_cluster_barrier, at_warp_barrier, in_shuffle, ended };

#ifdef __x86_64__

// A point of a thread of execution where another goes on: the stack with the registers that a call keeps. The library's
// swapcontext would ask the system for its signal mask each time, which takes longer than the kernels.
struct Context {
  void* stack = nullptr;
};

extern "C" void pearl_switch_stack(void** from, void* to);
asm(R"(
.text
.hidden pearl_switch_stack
.globl pearl_switch_stack
.type pearl_switch_stack, @function
pearl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pearl_switch_stack, .-pearl_switch_stack
)");

void switch_from(Context& from, Context& to) { pearl_switch_stack(&from.stack, to.stack); }

void prepare(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
  constexpr std::size_t kKept = 6;  // registers
  const auto end = reinterpret_cast<std::uintptr_t>(stack + bytes) / 16 * 16;
  auto** const top = reinterpret_cast<void**>(end);
  top[-1] = nullptr;  // where `entry` would return to
  top[-2] = reinterpret_cast<void*>(entry);
  std::fill(top - 2 - kKept, top - 2, nullptr);
  context.stack = top - 2 - kKept;
}

#else

using Context = ucontext_t;

void switch_from(Context& from, Context& to) { swapcontext(&from, &to); }

void prepare(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#endif

struct Copy {
  float* to;
  const float* from;
  std::size_t bytes;
  bool made;
  const void* code;  // which has started it
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  Here place;
  State state = State::ready;
  unsigned mask = 0, from = 0;  // of a shuffle
  std::uint64_t bits = 0;
  unsigned votes = 0;
  Source source;                          // of a barrier
  std::vector<std::vector<Copy>> copies;  // not waited for yet, by groups; the last is not ended
  races::Runner runner;
};

// The blocks that run at once, one after another.
struct Block {
  Call kernel;
  const device::Argument* arguments;
  std::size_t argument_count;
  std::vector<std::unique_ptr<Fiber>>& fibers;
  std::size_t block_threads;  // of one
  std::size_t memory_bytes;   // of one's own memory
  Order order;
  std::mt19937_64 random;
  std::vector<bool> met{};  // which clusters' blocks have waited for each other
  std::string mistake{};    // of a thread; errors cannot leave a fiber
  Context scheduler{};
  Fiber* running = nullptr;
};

thread_local Block* block = nullptr;

// The memory that kernels declare, as this thread has run them.
thread_local std::vector<std::pair<void*, std::size_t>> declared;

void fill(void* memory, std::size_t bytes) { std::memset(memory, 0xFF, bytes); }  // not numbers

void yield(State state) {
  Fiber& fiber = *block->running;
  fiber.state = state;
  races::running = nullptr;
  switch_from(fiber.context, block->scheduler);
}

void enter() {
  block->kernel(Wanted::run, block->arguments, block->argument_count);
  for (const std::vector<Copy>& group : block->running->copies)
    if (!group.empty()) block->mistake = "A thread has ended before its copies to the block's memory.";
  yield(State::ended);
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};
using BlockMemory = std::unique_ptr<float, Free>;

// Of each of `blocks`, filled with numbers that show where they are used.
std::vector<BlockMemory> block_memories(const device::LaunchShape& shape, std::size_t blocks) {
  constexpr std::size_t kAlignment = 16;
  std::vector<BlockMemory> memories(blocks);
  for (BlockMemory& memory : memories) {
    if (shape.block_bytes == 0) continue;
    const std::size_t bytes = (shape.block_bytes + kAlignment - 1) / kAlignment * kAlignment;
    memory.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
    if (memory == nullptr) throw DeviceError("A block has no memory.");
    fill(memory.get(), bytes);
  }
  return memories;
}

// Lets the threads of [first, end) go on if all of them are in this state.
bool release_all(std::size_t first, std::size_t end, State state) {
  for (std::size_t t = first; t < end; ++t)
    if (block->fibers[t]->state != state) return false;
  const unsigned line = block->fibers[first]->source.line();
  for (std::size_t t = first; t < end && state == State::at_barrier; ++t)
    if (block->fibers[t]->source.line() != line)
      throw DeviceError("The threads of a block wait at different barriers: in lines " + std::to_string(line) + " and " +
                        std::to_string(block->fibers[t]->source.line()) + ".");
  for (std::size_t t = first; t < end; ++t) {
    Fiber& fiber = *block->fibers[t];
    fiber.state = State::ready;
    fiber.runner.warp_waits += state == State::at_warp_barrier;
    fiber.runner.block_waits += state == State::at_barrier;
    fiber.runner.cluster_waits += state == State::at_cluster_barrier;
  }
  return true;
}

// Lets the threads of a warp, [first, end), go on if all of a shuffle's mask have come to it.
bool release_shuffle(std::size_t first, std::size_t end) {
  bool released = false;
  for (std::size_t t = first; t < end; ++t) {
    if (block->fibers[t]->state != State::in_shuffle) continue;
    // Others of the mask may still be in a shuffle of fewer threads.
    const unsigned mask = block->fibers[t]->mask;
    unsigned waiting = 0;
    for (std::size_t other = first; other < end; ++other)
      if (block->fibers[other]->state == State::in_shuffle && block->fibers[other]->mask == mask)
        waiting |= 1u << (other - first);
    if (waiting != mask) continue;
    std::uint64_t results[kWarp] = {};
    unsigned votes = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      const unsigned from = block->fibers[first + lane]->from;
      votes |= static_cast<unsigned>(block->fibers[first + lane]->bits & 1u) << lane;
      results[lane] = block->fibers[first + (from < kWarp && (mask >> from & 1u) != 0 ? from : lane)]->bits;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      Fiber& member = *block->fibers[first + lane];
      member.bits = results[lane];
      member.votes = votes;
      member.state = State::ready;
    }
    released = true;
  }
  return released;
}

// The numbers up to `count`, in the order in which threads run.
std::vector<std::size_t> in_turn(std::size_t count) {
  std::vector<std::size_t> turns(count);
  std::iota(turns.begin(), turns.end(), std::size_t{0});
  if (block->order == Order::descending) std::reverse(turns.begin(), turns.end());
  if (block->order == Order::shuffled) std::shuffle(turns.begin(), turns.end(), block->random);
  return turns;
}

// Runs some clusters of a launch at once.
void run_clusters(std::span<const std::size_t> groups, const device::LaunchShape& shape) {
  Block& current = *block;
  const auto lanes = static_cast<unsigned>(shape.lanes), size = static_cast<unsigned>(shape.cluster);
  const std::size_t blocks = groups.size() * shape.cluster, threads = blocks * current.block_threads;
  const std::vector<BlockMemory> owned = block_memories(shape, blocks);
  std::vector<float*> memories;
  for (const BlockMemory& memory : owned) memories.push_back(memory.get());
  if (current.order != Order::ascending)
    for (const auto& [memory, bytes] : declared) fill(memory, bytes);
  if constexpr (races::kFound) {
    for (const BlockMemory& memory : owned) races::forget(memory.get(), shape.block_bytes);
    for (const auto& [memory, bytes] : declared) races::forget(memory, bytes);
  }
  for (std::size_t t = 0; t < threads; ++t) {
    Fiber& fiber = *current.fibers[t];
    const auto thread = static_cast<unsigned>(t % current.block_threads);
    const auto slot = static_cast<unsigned>(t / current.block_threads), rank = slot % size;
    fiber.place = {{thread % lanes, thread / lanes, 0},
                   {static_cast<unsigned>(groups[slot / size]) * size + rank, 0, 0},
                   {lanes, static_cast<unsigned>(shape.rows), 1},
                   {static_cast<unsigned>(shape.groups) * size, 1, 1},
                   rank,
                   size,
                   slot,
                   memories.data() + slot - rank};
    fiber.runner = {.block = fiber.place.block.x,
                    .cluster = size,
                    .thread = static_cast<std::uint16_t>(thread),
                    .stack = fiber.stack.get(),
                    .stack_bytes = kStackBytes};
    fiber.copies.assign(1, {});
    fiber.state = State::ready;
    prepare(fiber.context, fiber.stack.get(), kStackBytes, &enter);
  }
  current.met.assign(groups.size(), false);
  std::vector<std::size_t> turns = in_turn(threads);
  while (true) {
    if (current.order == Order::shuffled) std::shuffle(turns.begin(), turns.end(), current.random);
    std::size_t ended = 0, waiting = 0;
    for (const std::size_t t : turns) {
      Fiber& fiber = *current.fibers[t];
      if (fiber.state == State::ready) {
        current.running = &fiber;
        here = &fiber.place;
        races::running = &fiber.runner;
        switch_from(current.scheduler, fiber.context);
      }
      ended += fiber.state == State::ended;
      waiting += fiber.state != State::ended && fiber.state != State::in_shuffle;
    }
    if (ended == threads) return;
    bool released = false;
    const std::size_t cluster_threads = shape.cluster * current.block_threads;
    for (std::size_t first = 0; first < threads; first += cluster_threads) {
      if (!release_all(first, first + cluster_threads, State::at_cluster_barrier)) continue;
      released = true;
      current.met[first / cluster_threads] = true;
    }
    for (std::size_t first = 0; first < threads; first += current.block_threads) {
      const std::size_t end = first + current.block_threads;
      released |= release_all(first, end, State::at_barrier);
      for (std::size_t warp = first; warp < end; warp += kWarp) {
        const std::size_t last = std::min(warp + kWarp, end);
        released |= release_all(warp, last, State::at_warp_barrier) || release_shuffle(warp, last);
      }
    }
    if (!released)
      throw DeviceError("A kernel's threads wait for each other forever: of " + std::to_string(threads) +
                        " threads that run at once, " + std::to_string(waiting) + " are at a barrier and " +
                        std::to_string(ended) + " have ended.");
  }
}

// Its source is read when it is started, or at any time until it is waited for.
void note_copy(const Copy& copy, races::Kind kind) {
  if constexpr (!races::kFound) return;
  races::note(races::Kind::read, copy.from, copy.bytes, copy.code);
  races::note(kind, copy.to, copy.bytes, copy.code);
}

}  // namespace

unsigned lane_here() { return (here->thread.y * here->threads.x + here->thread.x) % kWarp; }

void declare(void* memory, std::size_t bytes) {
  declared.emplace_back(memory, bytes);
  if (block->order != Order::ascending) fill(memory, bytes);
}

void wait_for_block(const Source& source) {
  block->running->source = source;
  yield(State::at_barrier);
}

void wait_for_cluster() { yield(State::at_cluster_barrier); }

void wait_for_warp() { yield(State::at_warp_barrier); }

void start_copy(float* to, const float* from, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(here->memories[here->rank]);
  const auto place = reinterpret_cast<std::uintptr_t>(to);
  const bool aligned = place % bytes == 0 && reinterpret_cast<std::uintptr_t>(from) % bytes == 0;
  if (!aligned || place < begin || place + bytes > begin + block->memory_bytes) {
    block->mistake = "A copy of " + std::to_string(bytes) +
                     (aligned ? " bytes goes beyond the block's memory." : " bytes is not aligned.");
    return;
  }
  const bool at_once =
      block->order == Order::ascending || (block->order == Order::shuffled && (block->random() & 1u) != 0);
  if (at_once) std::memcpy(to, from, bytes);
  block->running->copies.back().push_back({to, from, bytes, at_once, __builtin_return_address(0)});
  note_copy(block->running->copies.back().back(), races::Kind::copy);
}

void end_copies() { block->running->copies.emplace_back(); }

void wait_for_copies(int later) {
  auto& copies = block->running->copies;
  while (copies.size() > static_cast<std::size_t>(later) + 1) {
    for (const Copy& copy : copies.front()) {
      if (!copy.made) std::memcpy(copy.to, copy.from, copy.bytes);
      note_copy(copy, races::Kind::copied);
    }
    copies.erase(copies.begin());
  }
}

float* memory_of(unsigned rank) {
  if (rank == here->rank) return here->memories[rank];
  const std::size_t first = (here->slot - here->rank + rank) * block->block_threads;
  bool ended = true;
  for (std::size_t t = first; t < first + block->block_threads; ++t) ended &= block->fibers[t]->state == State::ended;
  if (!block->met[here->slot / here->cluster])
    block->mistake = "A block uses another's memory before the cluster's blocks have waited for each other.";
  else if (ended)
    block->mistake = "A block uses the memory of another one that has ended.";
  return here->memories[rank];
}

std::uint64_t shuffle(unsigned mask, std::uint64_t bits, unsigned from) {
  Fiber& fiber = *block->running;
  fiber.mask = mask;
  fiber.bits = bits;
  fiber.from = from;
  yield(State::in_shuffle);
  return fiber.bits;
}

std::uint64_t shuffle_down(unsigned mask, std::uint64_t bits, unsigned step) {
  return shuffle(mask, bits, lane_here() + step);
}

unsigned ballot(unsigned mask, bool wanted) {
  shuffle(mask, wanted, lane_here());
  return block->running->votes;
}

void run(Call kernel, const device::LaunchShape& shape, const device::Argument* arguments, std::size_t count, Order order,
         std::uint64_t seed) {
  kernel(Wanted::check, arguments, count);
  static thread_local std::vector<std::unique_ptr<Fiber>> fibers;
  const std::size_t block_threads = shape.rows * shape.lanes;
  const std::size_t at_once = order == Order::ascending ? 1 : std::min(kMostAtOnce / shape.cluster, shape.groups);
  while (fibers.size() < at_once * shape.cluster * block_threads) fibers.push_back(std::make_unique<Fiber>());
  Block current{kernel, arguments, count, fibers, block_threads, shape.block_bytes, order, std::mt19937_64(seed)};
  block = &current;
  races::begin_launch();
  try {
    const std::vector<std::size_t> groups = in_turn(shape.groups);
    for (std::size_t done = 0; done < groups.size(); done += at_once)
      run_clusters(std::span(groups).subspan(done, std::min(at_once, groups.size() - done)), shape);
    if (!current.mistake.empty()) throw DeviceError(current.mistake);
    if (!races::found().empty()) throw DeviceError(races::found());
  } catch (...) {
    block = nullptr;
    throw;
  }
  block = nullptr;
}

void throw_mismatch(std::size_t at) {
  throw DeviceError("The arguments of a launch do not fit the kernel's parameters; look at number " +
                    std::to_string(at) + ".");
}

std::vector<CompiledKernel>& compiled_kernels() {
  static std::vector<CompiledKernel> kernels;
  return kernels;
}

Registered::Registered(std::vector<CompiledKernel> kernels) {
  for (CompiledKernel& kernel : kernels) compiled_kernels().push_back(std::move(kernel));
}

}  // namespace pearl::emulator
