// CUDA's kernels on the host: included before a .cu file, this header gives it what nvcc would. A thread of a block is
// a fiber, which runs until a barrier or a shuffle. Where threads run in ascending order, so do clusters of blocks, one
// after another; else some run at once. So a test sees wrong indices, missing barriers, blocks that rely on others of
// their launch (in some order), reads of memory that a block has not written, and barriers that not all threads reach.
// Built with PEARL_RACES, it finds races (races.hpp).
#pragma once

#define PEARL_CUDA_ON_HOST

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "pearl/device/queue.hpp"
#include "races.hpp"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(threads)
#define __shared__ static thread_local  // of the block that runs

namespace pearl::emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// The running thread's place, as kernels read it.
struct Here {
  Index thread, block, threads, blocks;
  unsigned rank = 0, cluster = 1;    // of the block in its cluster, and the cluster's blocks
  unsigned slot = 0;                 // of the block among those that run at once
  float* const* memories = nullptr;  // of each block of the cluster: what the launch gave it
};
inline constexpr std::size_t kMostCluster = 8, kMostAtOnce = 8;  // blocks
extern thread_local const Here* here;

// Functions whose accesses are not reported to races.hpp.
#ifdef PEARL_RACES
#define PEARL_NOT_REPORTED __attribute__((no_sanitize_thread, noinline))
#else
#define PEARL_NOT_REPORTED
#endif

// Adds memory that is filled, before blocks begin, with numbers that show where they are used; not where threads run in
// ascending order, which is for tests of much else.
void declare(void* memory, std::size_t bytes);

// Memory that a kernel declares, of each block that runs at once.
template <class Type>
struct DeclaredMemory {
  Type blocks[kMostAtOnce];
  bool declared;

  PEARL_NOT_REPORTED Type& of_block() {
    if (!declared) declare(blocks, sizeof blocks);
    declared = true;
    return blocks[here->slot];
  }
};

// Waits for all threads of the block, at one place of the source, or of all blocks of the cluster.
using Source = std::source_location;
void wait_for_block(const Source& source);
void wait_for_cluster();
// Waits for all threads of the warp.
void wait_for_warp();
// Copies of the running thread which it must wait for: made at once, when it waits, or one or the other, as threads run
// in ascending, descending or shuffled order. Those since the last end_copies() are one group; wait_for_copies() does
// not wait for the last `later` groups.
void start_copy(float* to, const float* from, std::size_t bytes);
void end_copies();
void wait_for_copies(int later);
// What the launch gave a block of the running thread's cluster. Another block's memory is there from when the cluster's
// blocks have waited for each other until that block ends.
float* memory_of(unsigned rank);
// The running thread's lane in its warp.
unsigned lane_here();
// Waits for the threads of the warp in `mask`; returns what lane `from` gave, or `bits` if it is not among them.
std::uint64_t shuffle(unsigned mask, std::uint64_t bits, unsigned from);
// The same for `step` lanes higher.
std::uint64_t shuffle_down(unsigned mask, std::uint64_t bits, unsigned step);
// Waits as they do; returns for which lanes `wanted` holds.
unsigned ballot(unsigned mask, bool wanted);

// In which order the threads of a block run between two barriers.
enum class Order { ascending, descending, shuffled };

// A kernel, or only a check of its arguments, which throws DeviceError: no error can leave a fiber.
enum class Wanted { run, check };
using Call = void (*)(Wanted wanted, const device::Argument* arguments, std::size_t count);

// Runs a kernel; throws DeviceError for arguments of other types, and where threads wait for each other forever.
void run(Call kernel, const device::LaunchShape& shape, const device::Argument* arguments, std::size_t count, Order order,
         std::uint64_t seed);

[[noreturn]] void throw_mismatch(std::size_t at);

template <class T>
T unpacked(const device::Argument& argument, std::size_t at) {
  using Kind = device::Argument::Kind;
  const auto is = [&](Kind kind) {
    if (argument.kind != kind) throw_mismatch(at);
  };
  if constexpr (std::is_pointer_v<T>) {
    is(Kind::pointer);
    return static_cast<T>(const_cast<void*>(argument.pointer));
  } else if constexpr (std::is_same_v<T, float>) {
    is(Kind::float32);
    return argument.float32;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    is(Kind::int32);
    return argument.int32;
  } else if constexpr (std::is_same_v<T, std::uint32_t>) {
    is(Kind::uint32);
    return argument.uint32;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    is(Kind::int64);
    return argument.int64;
  } else {
    static_assert(std::is_same_v<T, std::uint64_t>);
    is(Kind::uint64);
    return argument.uint64;
  }
}

template <auto kernel, class... Parameters, std::size_t... at>
void call_with(void (*)(Parameters...), Wanted wanted, const device::Argument* arguments, std::index_sequence<at...>) {
  if (wanted == Wanted::run)
    kernel(unpacked<Parameters>(arguments[at], at)...);
  else
    (static_cast<void>(unpacked<Parameters>(arguments[at], at)), ...);
}

template <class... Parameters>
constexpr std::size_t count_of(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

// `kernel` as the queue calls it.
template <auto kernel>
void call(Wanted wanted, const device::Argument* arguments, std::size_t count) {
  constexpr std::size_t parameters = count_of(kernel);
  if (count != parameters) throw_mismatch(count);
  call_with<kernel>(kernel, wanted, arguments, std::make_index_sequence<parameters>());
}

// A kernel compiled for the host, from the file `stem`.cu with `options`.
struct CompiledKernel {
  std::string stem, options, name;
  Call call;
};
// All of them: each file that compiles some adds its own.
std::vector<CompiledKernel>& compiled_kernels();
struct Registered {
  explicit Registered(std::vector<CompiledKernel> kernels);
};

}  // namespace pearl::emulator

#define threadIdx (pearl::emulator::here->thread)
#define blockIdx (pearl::emulator::here->block)
#define blockDim (pearl::emulator::here->threads)
#define gridDim (pearl::emulator::here->blocks)

inline void __syncthreads(const std::source_location& source = std::source_location::current()) {
  pearl::emulator::wait_for_block(source);
}
inline void __syncwarp() {
  if constexpr (pearl::emulator::races::kFound) pearl::emulator::wait_for_warp();  // else nothing depends on it
}

namespace pearl::emulator {

template <class T, class Exchange>
T exchanged(T value, Exchange exchange) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace pearl::emulator

// In parts of `width` lanes of the warp, each for itself.
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane, unsigned width) {
  const unsigned from = pearl::emulator::lane_here() / width * width + lane % width;
  return pearl::emulator::exchanged(value, [&](auto bits) { return pearl::emulator::shuffle(mask, bits, from); });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, unsigned width) {
  const unsigned here = pearl::emulator::lane_here(), from = here % width >= step ? here - step : here;
  return pearl::emulator::exchanged(value, [&](auto bits) { return pearl::emulator::shuffle(mask, bits, from); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned step, unsigned width) {
  const unsigned here = pearl::emulator::lane_here(), other = here ^ step;
  const unsigned from = other / width == here / width ? other : here;
  return pearl::emulator::exchanged(value, [&](auto bits) { return pearl::emulator::shuffle(mask, bits, from); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step) {
  return pearl::emulator::exchanged(value, [&](auto bits) { return pearl::emulator::shuffle_down(mask, bits, step); });
}
inline unsigned __ballot_sync(unsigned mask, bool wanted) { return pearl::emulator::ballot(mask, wanted); }
inline int __popc(unsigned bits) { return std::popcount(bits); }

// All fibers of a launch run on one host thread.
namespace pearl::emulator {

template <class T, class Change>
PEARL_NOT_REPORTED T changed_atomically(T* at, Change change) {
  if constexpr (races::kFound) races::note(races::Kind::atomic_write, at, sizeof *at, __builtin_return_address(0));
  const T before = *at;
  *at = change(before);
  return before;
}

template <class T>
PEARL_NOT_REPORTED T glance(const T& at) {
  if constexpr (races::kFound) races::note(races::Kind::atomic_read, &at, sizeof at, __builtin_return_address(0));
  return at;
}

template <class T>
void write_alike(T& at, T value) {
  changed_atomically(&at, [value](T) { return value; });
}

}  // namespace pearl::emulator

template <class T>
T atomicAdd(T* at, T value) {
  return pearl::emulator::changed_atomically(at, [value](T before) { return before + value; });
}
template <class T>
T atomicMin(T* at, T value) {
  return pearl::emulator::changed_atomically(at, [value](T before) { return value < before ? value : before; });
}
template <class T>
T atomicMax(T* at, T value) {
  return pearl::emulator::changed_atomically(at, [value](T before) { return before < value ? value : before; });
}
