// The scan of generalized advantage estimation in AVX2: eight environments to a vector.
#include "pearl/gae.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define PEARL_SIMD __attribute__((target("avx2")))
#define PEARL_OP PEARL_SIMD inline __attribute__((always_inline))

namespace pearl {
namespace {

constexpr int kMostLanes = 8;
using Eight = std::integral_constant<int, 8>;

PEARL_OP __m256i widened(Eight, const std::uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
PEARL_OP __m256i widened(Eight, const std::uint16_t* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

#include "gae_kernels_body.hpp"

}  // namespace

const GaeKernels* avx2_gae_kernels() {
  static constexpr GaeKernels kernels = {"avx2", estimate};
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") ? &kernels : nullptr;
}

}  // namespace pearl

#endif
