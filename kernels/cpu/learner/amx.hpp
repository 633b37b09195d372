// Shared by the kernels in AMX: the shapes of tiles, and whether this process may use them.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 11 && \
    !defined(PEARL_WITHOUT_AMX)
#define PEARL_AMX 1

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PEARL_AMX_SIMD __attribute__((target("amx-tile,amx-bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define PEARL_AMX_INLINE PEARL_AMX_SIMD inline __attribute__((always_inline))

namespace pearl::learner::amx {

constexpr std::size_t kLanes = 16;  // rows of a tile, and float32 numbers in one
constexpr std::size_t kDepth = 32;  // bfloat16 numbers in a row: what a tile multiplies at once
constexpr std::size_t kParts = 3;   // bfloat16 numbers whose sum is a float32
constexpr std::size_t kTileNumbers = kDepth * kLanes;

// As the instruction reads it: palette 1, then bytes per row and rows of each tile.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Eight whole tiles.
inline constexpr TileShapes kWholeTiles = [] {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.bytes[tile] = 2 * kDepth;
    shapes.rows[tile] = kLanes;
  }
  return shapes;
}();

// Pairs of the upper halves of numbers.
PEARL_AMX_INLINE __m512i pair_of(__m512i lower, __m512i upper) {
  const __m512i down =
      _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15, -1, -1));
  constexpr __mmask64 kLower = 0x3333333333333333u;
  return _mm512_mask_shuffle_epi8(upper, kLower, lower, down);
}

// Pairs of numbers (even, odd) as `Parts` vectors of pairs of bfloat16 numbers, `Apart` from each other. With `Rounds`,
// the first of three parts is rounded to the nearest, so that the rest has either sign; else it is cut off, which takes
// less time. One rounded factor is enough: then the omitted products of parts have either sign.
template <std::size_t Parts, bool Rounds = true, std::size_t Apart = kTileNumbers>
PEARL_AMX_INLINE void split(__m512 even, __m512 odd, std::uint16_t* to) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)), half = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 3
  for (std::size_t part = 0; part < Parts; ++part) {
    __m512i first = _mm512_castps_si512(even), second = _mm512_castps_si512(odd);
    if ((Rounds && part == 0) || Parts == 2) {
      first = _mm512_add_epi32(first, half);
      second = _mm512_add_epi32(second, half);
    }
    _mm512_store_si512(to + part * Apart, pair_of(first, second));
    if (part + 1 == Parts) return;
    even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_and_si512(first, upper)));
    odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(second, upper)));
  }
}

// Every kernel calls these before its products and after them; in between, it may use the tiles freely.
void set_up_tiles(const TileShapes& shapes);
void give_up_tiles();

// Whether the processor has AMX and the system grants its registers to this process, and to threads it starts later.
bool granted();

}  // namespace pearl::learner::amx

#endif
