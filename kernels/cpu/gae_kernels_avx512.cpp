// The scan of generalized advantage estimation in AVX-512: sixteen environments to a vector.
#include "pearl/gae.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define PEARL_SIMD __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2")))
#define PEARL_OP PEARL_SIMD inline __attribute__((always_inline))

namespace pearl {
namespace {

constexpr int kMostLanes = 16;
using Eight = std::integral_constant<int, 8>;

PEARL_OP __m256i widened(Eight, const std::uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
PEARL_OP __m256i widened(Eight, const std::uint16_t* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

using Sixteen = std::integral_constant<int, 16>;

PEARL_OP __m512i widened(Sixteen, const std::uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
PEARL_OP __m512i widened(Sixteen, const std::uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

#include "gae_kernels_body.hpp"

}  // namespace

const GaeKernels* avx512_gae_kernels() {
  static constexpr GaeKernels kernels = {"avx512", estimate};
  __builtin_cpu_init();
  const bool present = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx2");
  return present ? &kernels : nullptr;
}

}  // namespace pearl

#endif
