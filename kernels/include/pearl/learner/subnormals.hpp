// Subnormal numbers (below 1.2e-38) as zero, while an object of this type lives, in the thread that made it.
//
// The moments of weights whose gradient stays 0 (behind dead ReLUs) shrink until they are subnormal, and arithmetic
// with those takes a hundred cycles: it made whole steps 1.2 to 1.7 times as long after some thousand.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace pearl::learner {

class SubnormalsAreZero {
 public:
  SubnormalsAreZero() : before_(read()) { write(before_ | kFlush); }
  ~SubnormalsAreZero() { write(before_); }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
#if defined(__SSE__)
  using Word = unsigned int;
  static constexpr Word kFlush = 0x8040;  // results (FTZ) and operands (DAZ)
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // FPCR.FZ
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = int;
  static constexpr Word kFlush = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word before_;
};

}  // namespace pearl::learner
