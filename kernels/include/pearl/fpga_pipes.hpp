// Pipes between the autorun kernels of an FPGA program, and integers of exactly the width that a design needs.
//
// A stage is a function template over the pipes that it reads and writes. A generated program only names the pipes and
// connects the stages (kernels/sycl/fpga_program.cpp).
#pragma once

#include <cstdint>

namespace pearl::fpga {

#if defined(__clang__)
template <unsigned bits>
using Word = unsigned _BitInt(bits);
#else
template <unsigned bits>
using Word = std::uint64_t;
#endif

struct LearnerContext;

// A placeholder for a part that a program does not have.
struct None {};

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)

template <class Program, int at>
struct PipeName;

#if defined(PEARL_AHEAD_OF_TIME)

// The at-th pipe of the program named `Program`, with room for `items`.
template <class Program, int at, class Item, int items>
using Pipe = sycl::ext::intel::pipe<PipeName<Program, at>, Item, items>;

#else

// On the emulator, kernels are host threads. A blocking pipe read or write keeps its core busy until the scheduler
// preempts it: milliseconds for each stage that an item passes. So stages yield and nap instead. Kernels there may call
// functions that the C library exports; the compiler does not warn about names with two leading underscores.
struct Nap {
  long seconds, nanoseconds;
};
extern "C" SYCL_EXTERNAL int __sched_yield();
extern "C" SYCL_EXTERNAL int __nanosleep(const Nap*, Nap*);

inline constexpr int kYields = 100;      // before a stage naps
inline constexpr int kShortNaps = 100;   // before it takes longer naps: idle for 10 ms
inline constexpr long kShortNap = 50'000, kLongNap = 1'000'000;  // ns

template <class Attempt>
void until(Attempt attempt) {
  for (int turn = 0; !attempt(); ++turn) {
    if (turn < kYields) {
      __sched_yield();
    } else {
      const Nap nap{0, turn < kYields + kShortNaps ? kShortNap : kLongNap};
      __nanosleep(&nap, nullptr);
    }
  }
}

// The at-th pipe of the program named `Program`, with room for `items`.
template <class Program, int at, class Item, int items>
struct Pipe {
  using Raw = sycl::ext::intel::pipe<PipeName<Program, at>, Item, items>;

  static Item read() {
    Item item;
    until([&] {
      bool found = false;
      item = Raw::read(found);
      return found;
    });
    return item;
  }
  static void write(const Item& item) {
    until([&] {
      bool taken = false;
      Raw::write(item, taken);
      return taken;
    });
  }
};

#endif

#endif

}  // namespace pearl::fpga
