#include "pearl/row_copy.hpp"

#include <cstring>

namespace pearl {
namespace {

// A copy of one scattered row is limited by the hardware prefetcher, which fetches few lines and only within a page of
// 4 KiB. Four interleaved copies (lanes) with software prefetching, which continues into the lane's next row, come close
// to the bandwidth of one long copy. (Measured with 2 to 8 lanes, 0.5 to 16 KiB.)
constexpr std::size_t kLanes = 4;
constexpr std::size_t kAhead = 1024;
constexpr std::size_t kLine = 64;

// Loads a whole line before storing it: alternating loads and stores were 10% slower.
template <std::size_t Width>
[[gnu::always_inline]] inline void copy_line(const char* source, char* target) {
  typedef char Vector __attribute__((vector_size(Width), aligned(1)));
  Vector line[kLine / Width];
  for (std::size_t k = 0; k < kLine / Width; ++k) line[k] = *reinterpret_cast<const Vector*>(source + k * Width);
  for (std::size_t k = 0; k < kLine / Width; ++k) *reinterpret_cast<Vector*>(target + k * Width) = line[k];
}

// `following`: the rows that these lanes copy next, or the same rows again.
template <std::size_t Lanes, std::size_t Width>
[[gnu::always_inline]] inline void copy_lanes(const char* const* sources, const char* const* following,
                                              std::size_t bytes, char* target) {
  const std::size_t own = bytes - kAhead;  // from here on, prefetches go to the following row
  std::size_t at = 0;
  for (; at < own && at + kLine <= bytes; at += kLine)
    for (std::size_t lane = 0; lane < Lanes; ++lane) {
      __builtin_prefetch(sources[lane] + at + kAhead);
      copy_line<Width>(sources[lane] + at, target + lane * bytes + at);
    }
  for (; at + kLine <= bytes; at += kLine)
    for (std::size_t lane = 0; lane < Lanes; ++lane) {
      __builtin_prefetch(following[lane] + (at - own));
      copy_line<Width>(sources[lane] + at, target + lane * bytes + at);
    }
  for (std::size_t lane = 0; lane < Lanes; ++lane)
    std::memcpy(target + lane * bytes + at, sources[lane] + at, bytes - at);
}

template <std::size_t Width>
[[gnu::always_inline]] inline void copy_all(const char* const* sources, std::size_t count, std::size_t bytes,
                                            char* target) {
  for (std::size_t lane = 0; lane < kLanes && lane < count; ++lane)
    for (std::size_t at = 0; at < kAhead; at += kLine) __builtin_prefetch(sources[lane] + at);
  std::size_t row = 0;
  for (; row + kLanes <= count; row += kLanes) {
    const bool more = row + 2 * kLanes <= count;
    copy_lanes<kLanes, Width>(sources + row, sources + row + (more ? kLanes : 0), bytes, target + row * bytes);
  }
  for (; row < count; ++row)
    copy_lanes<1, Width>(sources + row, sources + row + (row + 1 < count), bytes, target + row * bytes);
}

void copy_plain(const char* const* sources, std::size_t count, std::size_t bytes, char* target) {
  copy_all<16>(sources, count, bytes, target);
}

#ifdef __x86_64__
// Half lines were faster than whole lines (AVX-512), and more machines support them.
[[gnu::target("avx2")]] void copy_avx2(const char* const* sources, std::size_t count, std::size_t bytes, char* target) {
  copy_all<32>(sources, count, bytes, target);
}
#endif

}  // namespace

std::vector<CopyRows> copy_rows_variants() {
  std::vector<CopyRows> found = {&copy_plain};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) found.push_back(&copy_avx2);
#endif
  return found;
}

void copy_rows(const char* const* sources, std::size_t count, std::size_t bytes, char* target) {
  static const CopyRows fastest = copy_rows_variants().back();
  fastest(sources, count, bytes, target);
}

}  // namespace pearl
