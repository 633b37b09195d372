// Finds races in the kernels that the emulator runs, whatever order their threads run in: two accesses to the same memory
// by different threads, one of them a write, with no barrier between them that orders them. Where the module is built with
// PEARL_RACES, the compiler has each load and store of a kernel reported here (-fsanitize=thread, without its runtime).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pearl::emulator::races {

#ifdef PEARL_RACES
inline constexpr bool kFound = true;
#else
inline constexpr bool kFound = false;
#endif

// The thread that runs: where it is in its launch, how many barriers it has passed, and its stack, which is its own.
struct Runner {
  std::uint32_t block = 0, cluster = 1;  // of the launch; how many a cluster has
  std::uint16_t thread = 0;              // of the block
  std::uint16_t warp_waits = 0, block_waits = 0, cluster_waits = 0;
  const char* stack = nullptr;
  std::size_t stack_bytes = 0;
};

// `copy`: to this memory, at some time until the running thread waits for it, when it is `copied`.
enum class Kind : std::uint8_t { read, write, atomic_read, atomic_write, copy, copied };

// Null where no kernel runs.
extern thread_local const Runner* running;

// No access before is of this launch.
void begin_launch();
// The memory is that of other blocks from now on.
void forget(const void* memory, std::size_t bytes);
// An access of the running thread, by the instruction at `code`.
void note(Kind kind, const void* memory, std::size_t bytes, const void* code);
// What the first race since begin_launch() was; empty if there was none.
const std::string& found();

}  // namespace pearl::emulator::races
