// Transposes columns into vectors, for kernels in AVX-512 and in AMX.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>

namespace pearl::learner {

// Four columns of 16 rows, turned: lane i of `turned[k]` is number k of row i. Quarters of vectors are put together as
// they are loaded, which needs half the shuffles of whole rows.
__attribute__((target("avx512f"), always_inline)) inline void turn_columns(const float* rows, std::size_t row,
                                                                           __m512* turned) {
  __m512 of[4];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) {
    of[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows + i * row));
    of[i] = _mm512_insertf32x4(of[i], _mm_loadu_ps(rows + (4 + i) * row), 1);
    of[i] = _mm512_insertf32x4(of[i], _mm_loadu_ps(rows + (8 + i) * row), 2);
    of[i] = _mm512_insertf32x4(of[i], _mm_loadu_ps(rows + (12 + i) * row), 3);
  }
  const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(of[0], of[1]));
  const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(of[0], of[1]));
  const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(of[2], of[3]));
  const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(of[2], of[3]));
  turned[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
  turned[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
  turned[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
  turned[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
}

}  // namespace pearl::learner

#endif
