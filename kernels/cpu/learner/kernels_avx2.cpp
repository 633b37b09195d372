// The learner's loops in AVX2 with fused multiply-add.
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

#include "interleave.hpp"

#define PEARL_SIMD __attribute__((target("avx2,fma,bmi,popcnt")))
#define PEARL_OP PEARL_SIMD inline __attribute__((always_inline))

namespace pearl::learner {
namespace {

constexpr std::size_t kLanes = 8;
constexpr int kRows = 6;  // 12 sums, two vectors of b, one of a: 15 of 16 registers

using F = __m256;

alignas(32) constexpr int kMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
PEARL_OP __m256i first_lanes(std::size_t count) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMasks + kLanes - count));
}

PEARL_OP F zero() { return _mm256_setzero_ps(); }
PEARL_OP F spread(float x) { return _mm256_set1_ps(x); }
PEARL_OP F spread(const float* x) { return _mm256_broadcast_ss(x); }
PEARL_OP F load(const float* x) { return _mm256_loadu_ps(x); }
PEARL_OP F load_first(const float* x, std::size_t count) { return _mm256_maskload_ps(x, first_lanes(count)); }
PEARL_OP F load_bytes(const std::uint8_t* x) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
}
PEARL_OP void store(float* x, F value) { _mm256_storeu_ps(x, value); }
PEARL_OP void store_first(float* x, F value, std::size_t count) {
  _mm256_maskstore_ps(x, first_lanes(count), value);
}
PEARL_OP F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
PEARL_OP F square_root(F a) { return _mm256_sqrt_ps(a); }
PEARL_OP F fast_root(F a) { return square_root(a); }
PEARL_OP F minus_fast_quotient(F from, F a, F b) { return from - a / b; }
PEARL_OP F min(F a, F b) { return _mm256_min_ps(a, b); }
// NaN if a is NaN.
PEARL_OP F max(F a, F b) { return _mm256_max_ps(b, a); }
PEARL_OP F absolute(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
PEARL_OP F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PEARL_OP F times_power_of_two(F a, F whole) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
PEARL_OP F with_sign_of(F size, F sign) {
  return _mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
PEARL_OP F where_above(F a, F bound, F then, F otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, bound, _CMP_GT_OQ));
}
PEARL_OP F where_positive(F gate, F value) {
  return _mm256_and_ps(_mm256_cmp_ps(gate, zero(), _CMP_GT_OQ), value);
}
PEARL_OP std::uint32_t bits_of(F mask) { return static_cast<std::uint32_t>(_mm256_movemask_ps(mask)); }
PEARL_OP std::uint32_t bits_above(F a) { return bits_of(_mm256_cmp_ps(a, zero(), _CMP_GT_OQ)); }
PEARL_OP std::uint32_t bits_nonzero(F a) { return bits_of(_mm256_cmp_ps(a, zero(), _CMP_NEQ_UQ)); }
PEARL_OP F keep_bits(F a, std::uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
  return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each)));
}
PEARL_OP F spread_number(const float* x) { return spread(x); }
PEARL_OP F spread_short(std::int16_t x) { return _mm256_cvtepi32_ps(_mm256_set1_epi32(x)); }
PEARL_OP std::uint16_t nonzero_shorts(const std::int16_t* x) {
  const auto* const halves = reinterpret_cast<const __m128i*>(x);
  const __m128i none = _mm_setzero_si128();
  const __m128i zeros = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_loadu_si128(halves), none),
                                        _mm_cmpeq_epi16(_mm_loadu_si128(halves + 1), none));
  return static_cast<std::uint16_t>(~_mm_movemask_epi8(zeros));
}
PEARL_OP std::size_t lowest_bit(std::uint64_t bits) { return _tzcnt_u64(bits); }
PEARL_OP float total(F a) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
PEARL_OP F totals(const F* rows) {
  float sums[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) sums[i] = total(rows[i]);
  return load(sums);
}

PEARL_SIMD void transpose_block(const float* source, std::size_t source_row, float* destination,
                                std::size_t destination_row) {
  F row[kLanes], pair[kLanes];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kLanes; ++i) row[i] = load(source + i * source_row);
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kLanes; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
#pragma GCC unroll 2
  for (std::size_t i = 0; i < kLanes; i += 4) {
#pragma GCC unroll 2
    for (std::size_t k = 0; k < 2; ++k) {
      row[i + 2 * k] = _mm256_shuffle_ps(pair[i + k], pair[i + k + 2], _MM_SHUFFLE(1, 0, 1, 0));
      row[i + 2 * k + 1] = _mm256_shuffle_ps(pair[i + k], pair[i + k + 2], _MM_SHUFFLE(3, 2, 3, 2));
    }
  }
#pragma GCC unroll 4
  for (std::size_t k = 0; k < 4; ++k) {
    store(destination + k * destination_row, _mm256_permute2f128_ps(row[k], row[k + 4], 0x20));
    store(destination + (k + 4) * destination_row, _mm256_permute2f128_ps(row[k], row[k + 4], 0x31));
  }
}

#include "kernels_body.hpp"
#include "sparse_body.hpp"

}  // namespace

const LearnerKernels* avx2_learner_kernels() {
  static constexpr LearnerKernels kernels = sparse_table_of("avx2");
  __builtin_cpu_init();
  const bool present = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                       __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  return present ? &kernels : nullptr;
}

}  // namespace pearl::learner

#endif
