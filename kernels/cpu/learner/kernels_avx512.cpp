// The learner's loops in AVX-512.
#include "pearl/aligned.hpp"
#include "pearl/learner/kernels.hpp"
#include "pearl/learner/sparse_convolution.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "avx512_turn.hpp"
#include "interleave.hpp"

#define PEARL_SIMD __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,bmi,popcnt")))
#define PEARL_OP PEARL_SIMD inline __attribute__((always_inline))

namespace pearl::learner {
namespace {

constexpr std::size_t kLanes = 16;
constexpr int kRows = 14;  // 28 sums, two vectors of b, one of a: 31 of 32 registers

using F = __m512;

PEARL_OP __mmask16 first_lanes(std::size_t count) { return static_cast<__mmask16>((1u << count) - 1); }

PEARL_OP F zero() { return _mm512_setzero_ps(); }
PEARL_OP F spread(float x) { return _mm512_set1_ps(x); }
PEARL_OP F spread(const float* x) { return _mm512_set1_ps(*x); }
PEARL_OP F load(const float* x) { return _mm512_loadu_ps(x); }
PEARL_OP F load_first(const float* x, std::size_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), x); }
PEARL_OP F load_bytes(const std::uint8_t* x) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
PEARL_OP void store(float* x, F value) { _mm512_storeu_ps(x, value); }
PEARL_OP void store_first(float* x, F value, std::size_t count) {
  _mm512_mask_storeu_ps(x, first_lanes(count), value);
}
PEARL_OP F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
PEARL_OP F square_root(F a) { return _mm512_sqrt_ps(a); }
// Of Adam, whose loop is bound by the instructions for them: to 2 units in the last place, in a third of the time.
PEARL_OP F fast_root(F a) {
  const F guess = _mm512_rsqrt14_ps(a);
  const F root = _mm512_mul_ps(a, guess);
  const F error = _mm512_fnmadd_ps(root, _mm512_mul_ps(guess, spread(0.5f)), spread(0.5f));
  // Zero and infinity are their own roots, whatever the estimate gives: fields 2 and 5 of the fix-up table.
  return _mm512_fixupimm_ps(_mm512_fmadd_ps(root, error, root), a, _mm512_set1_epi32(0x00100100), 0);
}
PEARL_OP F minus_fast_quotient(F from, F a, F b) {
  const F below = _mm512_min_ps(spread(0x1p126f), b);  // whose inverse is no subnormal number; a NaN stays a NaN
  const F guess = _mm512_rcp14_ps(below);
  const F inverse = _mm512_fmadd_ps(guess, _mm512_fnmadd_ps(below, guess, spread(1.0f)), guess);
  return _mm512_fnmadd_ps(a, inverse, from);
}
PEARL_OP F min(F a, F b) { return _mm512_min_ps(a, b); }
// NaN if a is NaN.
PEARL_OP F max(F a, F b) { return _mm512_max_ps(b, a); }
PEARL_OP F absolute(F a) { return _mm512_abs_ps(a); }
PEARL_OP F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PEARL_OP F times_power_of_two(F a, F whole) { return _mm512_scalef_ps(a, whole); }
PEARL_OP F with_sign_of(F size, F sign) {
  return _mm512_or_ps(size, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
PEARL_OP F where_above(F a, F bound, F then, F otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, bound, _CMP_GT_OQ), then);
}
PEARL_OP F where_positive(F gate, F value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(gate, zero(), _CMP_GT_OQ), value);
}
PEARL_OP std::uint32_t bits_above(F a) { return _mm512_cmp_ps_mask(a, zero(), _CMP_GT_OQ); }
PEARL_OP std::uint32_t bits_nonzero(F a) { return _mm512_cmp_ps_mask(a, zero(), _CMP_NEQ_UQ); }
PEARL_OP F keep_bits(F a, std::uint32_t bits) { return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), a); }
// Through an integer register: a broadcasting load would occupy a unit that loads 64 bytes.
PEARL_OP F spread_number(const float* x) {
  std::int32_t bits;
  std::memcpy(&bits, x, sizeof(bits));
  asm("" : "+r"(bits));
  return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}
PEARL_OP F spread_short(std::int16_t x) { return _mm512_cvtepi32_ps(_mm512_set1_epi32(x)); }
PEARL_OP std::uint16_t nonzero_shorts(const std::int16_t* x) {
  const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm256_test_epi16_mask(numbers, numbers);
}
PEARL_OP std::size_t lowest_bit(std::uint64_t bits) { return _tzcnt_u64(bits); }
PEARL_OP float total(F a) { return _mm512_reduce_add_ps(a); }
// Of each half of a, then of b: its two quarters.
PEARL_OP F sums_of_quarters(F a, F b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xDD); }
PEARL_OP F totals(const F* rows) {
  F half[8], quarter[4];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < 8; ++i)
    half[i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]) + _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(half[2 * i]), high = _mm512_castps_pd(half[2 * i + 1]);
    quarter[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)) + _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
  return sums_of_quarters(sums_of_quarters(quarter[0], quarter[1]), sums_of_quarters(quarter[2], quarter[3]));
}

PEARL_SIMD void transpose_block(const float* source, std::size_t source_row, float* destination,
                                std::size_t destination_row) {
#pragma GCC unroll 4
  for (std::size_t k = 0; k < kLanes; k += 4) {
    F turned[4];
    turn_columns(source + k, source_row, turned);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) store(destination + (k + i) * destination_row, turned[i]);
  }
}

#include "kernels_body.hpp"
#include "sparse_body.hpp"

}  // namespace

const LearnerKernels* avx512_learner_kernels() {
  static constexpr LearnerKernels kernels = sparse_table_of("avx512");
  __builtin_cpu_init();
  const bool present = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                       __builtin_cpu_supports("popcnt");
  return present ? &kernels : nullptr;
}

}  // namespace pearl::learner

#endif
