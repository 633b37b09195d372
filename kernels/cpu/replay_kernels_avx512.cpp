// The Replay Manager's hot loops in AVX-512: eight 64-bit lanes.
#include "pearl/replay_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/tree_descent.hpp"

#define PEARL_SIMD __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,bmi2,popcnt")))
#define PEARL_OP PEARL_SIMD inline __attribute__((always_inline))

namespace pearl {
namespace {

constexpr std::size_t kLanes = 8;
// With one vector, the chain of dependent instructions is longer than a processor's window.
constexpr int kVectors = 4;
constexpr bool kPartial = true;
constexpr unsigned kSkipping = 128;

using Wide = __m512i;
using Half = __m256i;
using Small = Wide;
using Mask = __mmask8;
using Floats = __m256;

PEARL_OP Wide constant(std::int64_t value) { return _mm512_set1_epi64(value); }
PEARL_OP Wide multiples_of(std::uint64_t step) {
  return _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), constant(static_cast<std::int64_t>(step)));
}
PEARL_OP Wide load(const void* from) { return _mm512_loadu_si512(from); }
PEARL_OP Wide add(Wide a, Wide b) { return _mm512_add_epi64(a, b); }
PEARL_OP Wide subtract(Wide a, Wide b) { return _mm512_sub_epi64(a, b); }
PEARL_OP Wide bit_and(Wide a, Wide b) { return _mm512_and_si512(a, b); }
PEARL_OP Wide bit_or(Wide a, Wide b) { return _mm512_or_si512(a, b); }
PEARL_OP Wide bit_xor(Wide a, Wide b, Wide c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
template <int Bits>
PEARL_OP Wide shift_left(Wide a) { return _mm512_slli_epi64(a, Bits); }
template <int Bits>
PEARL_OP Wide shift_right(Wide a) { return _mm512_srli_epi64(a, Bits); }
template <int Bits>
PEARL_OP Wide shift_right_signed(Wide a) { return _mm512_srai_epi64(a, Bits); }
PEARL_OP Wide shift_left_by(Wide a, Wide bits) { return _mm512_sllv_epi64(a, bits); }
PEARL_OP Wide shift_right_by(Wide a, Wide bits) { return _mm512_srlv_epi64(a, bits); }
// The products of the lower halves.
PEARL_OP Wide multiply_halves(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
PEARL_OP Wide multiply_narrow(Wide a, Wide b) { return _mm512_mullo_epi64(a, b); }

PEARL_OP Mask first_lanes(std::size_t count) {
  return static_cast<Mask>(count < kLanes ? (1u << count) - 1 : 0xFFu);
}
PEARL_OP Half every_half(int value) { return _mm256_set1_epi32(value); }
PEARL_OP Half load_half(const void* from, std::size_t count, int otherwise) {
  return _mm256_mask_loadu_epi32(every_half(otherwise), first_lanes(count), from);
}
PEARL_OP void store_half(void* to, std::size_t count, Half value) {
  _mm256_mask_storeu_epi32(to, first_lanes(count), value);
}
PEARL_OP Half add(Half a, Half b) { return _mm256_add_epi32(a, b); }
template <int Bits>
PEARL_OP Half shift_left(Half a) { return _mm256_slli_epi32(a, Bits); }
PEARL_OP Mask below(Half a, int bound) { return _mm256_cmplt_epi32_mask(a, every_half(bound)); }
PEARL_OP Mask above(Half a, int bound) { return _mm256_cmpgt_epi32_mask(a, every_half(bound)); }
PEARL_OP Half where(Mask mask, Half then, Half otherwise) { return _mm256_mask_mov_epi32(otherwise, mask, then); }
PEARL_OP Half zero_unless(Mask mask, Half value) { return _mm256_maskz_mov_epi32(mask, value); }

PEARL_OP Small small(int value) { return constant(value); }
PEARL_OP Small clip(Small a, int least, int most) {
  return _mm512_min_epi64(_mm512_max_epi64(a, small(least)), small(most));
}
PEARL_OP Small subtract_where(Mask mask, Small a, Small b) { return _mm512_mask_sub_epi64(a, mask, a, b); }
PEARL_OP Small half_to_small(Half a) { return _mm512_cvtepu32_epi64(a); }
PEARL_OP Half small_to_half(Small a) { return _mm512_cvtepi64_epi32(a); }
PEARL_OP Wide to_wide(Small a) { return a; }
PEARL_OP Small to_small(Wide a) { return a; }
PEARL_OP Small upper_halves(Wide a) { return shift_right_signed<32>(a); }

PEARL_OP Floats every_float(float value) { return _mm256_set1_ps(value); }
PEARL_OP Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
PEARL_OP Floats as_floats(Half bits) { return _mm256_castsi256_ps(bits); }
PEARL_OP Half as_half(Floats a) { return _mm256_castps_si256(a); }
PEARL_OP Half converted_to_float(Half a) { return as_half(_mm256_cvtepi32_ps(a)); }
PEARL_OP Wide bits_as_double(Half a) { return _mm512_castpd_si512(_mm512_cvtepi32_pd(a)); }
PEARL_OP Floats rounded_to_float(Wide a) { return _mm512_cvtepu64_ps(a); }

// Stores a[0], b[0], a[1], b[1] and so on: the first `count`.
PEARL_OP void store_pairs(std::uint64_t* to, std::size_t count, Wide a, Wide b) {
  const Wide low_half = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const Wide high_half = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  _mm512_mask_storeu_epi64(to, first_lanes(count), _mm512_permutex2var_epi64(a, low_half, b));
  if (count > kLanes)
    _mm512_mask_storeu_epi64(to + kLanes, first_lanes(count - kLanes), _mm512_permutex2var_epi64(a, high_half, b));
}

PEARL_SIMD std::uint32_t smallest(const std::uint32_t* leaves, std::size_t count) {
  Wide least = _mm512_set1_epi32(-1);
  for (std::size_t i = 0; i < count; i += 16) {
    const auto lanes = static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xFFFFu);
    least = _mm512_mask_min_epu32(least, lanes, least, _mm512_maskz_loadu_epi32(lanes, leaves + i));
  }
  return _mm512_reduce_min_epu32(least);
}

PEARL_SIMD inline Wide prefix_sums(Wide sums) {
  const Wide zero = _mm512_setzero_si512();
  sums = add(sums, _mm512_alignr_epi64(sums, zero, 7));
  sums = add(sums, _mm512_alignr_epi64(sums, zero, 6));
  return add(sums, _mm512_alignr_epi64(sums, zero, 4));
}

// Masks are counted at once, not kept: GCC 12 may store a mask of 8 lanes as one byte and read four bytes back.
PEARL_OP unsigned lanes_of(Mask passed) { return static_cast<unsigned>(_mm_popcnt_u32(passed)); }

// Lowers the target by the sum of the lanes before the picked one. Also writes sums[-1].
PEARL_OP unsigned take(unsigned pick, std::uint64_t* sums, std::uint64_t& target) {
  sums[-1] = 0;
  target -= (sums - 1)[pick];
  return pick;
}

template <unsigned K>
PEARL_SIMD inline unsigned pick_of_few(const std::uint64_t* siblings, std::uint64_t& target) {
  alignas(64) std::uint64_t before[K + 8];
  if constexpr (K == 4) {
    const Half zero = _mm256_setzero_si256();
    Half sums = _mm256_loadu_si256(reinterpret_cast<const Half*>(siblings));
    sums = _mm256_add_epi64(sums, _mm256_alignr_epi64(sums, zero, 3));
    sums = _mm256_add_epi64(sums, _mm256_alignr_epi64(sums, zero, 2));
    const unsigned pick =
        lanes_of(_mm256_cmple_epu64_mask(sums, _mm256_set1_epi64x(static_cast<std::int64_t>(target))));
    _mm256_store_si256(reinterpret_cast<Half*>(before + 8), sums);
    return take(pick, before + 8, target);
  } else {
    const Wide wanted = constant(static_cast<std::int64_t>(target));
    const Wide low = prefix_sums(load(siblings));
    unsigned pick = lanes_of(_mm512_cmple_epu64_mask(low, wanted));
    _mm512_store_si512(before + 8, low);
    if constexpr (K == 16) {
      const Wide high = add(prefix_sums(load(siblings + 8)), _mm512_permutexvar_epi64(constant(7), low));
      pick += lanes_of(_mm512_cmple_epu64_mask(high, wanted));
      _mm512_store_si512(before + 16, high);
    }
    return take(pick, before + 8, target);
  }
}

// Not _mm512_reduce_add: its last addition is of signed scalars, which must not overflow.
PEARL_SIMD inline std::uint64_t sum_of_sixteen(const std::uint64_t* siblings) {
  const Wide eight = add(load(siblings), load(siblings + 8));
  const Half four = _mm256_add_epi64(_mm512_castsi512_si256(eight), _mm512_extracti64x4_epi64(eight, 1));
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))));
}

PEARL_SIMD inline std::uint32_t sum_of_sixteen(const std::uint32_t* siblings) {
  const Wide sixteen = load(siblings);
  const Half eight = add(_mm512_castsi512_si256(sixteen), _mm512_extracti64x4_epi64(sixteen, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1))));
}

// One bit per leaf whose prefix sum is at most the target.
template <unsigned K>
PEARL_SIMD inline unsigned leaves_passed(const std::uint32_t* siblings, int target) {
  if constexpr (K == 8) {
    const Half zero = _mm256_setzero_si256();
    Half sums = _mm256_loadu_si256(reinterpret_cast<const Half*>(siblings));
    sums = add(sums, _mm256_alignr_epi32(sums, zero, 7));
    sums = add(sums, _mm256_alignr_epi32(sums, zero, 6));
    sums = add(sums, _mm256_alignr_epi32(sums, zero, 4));
    return _mm256_cmple_epu32_mask(sums, every_half(target));
  } else {
    const Wide zero = _mm512_setzero_si512();
    Wide sums = load(siblings);
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 15));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 14));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 12));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 8));
    return _mm512_cmple_epu32_mask(sums, _mm512_set1_epi32(target));
  }
}

#include "replay_kernels_body.hpp"

}  // namespace

const ReplayKernels* avx512_replay_kernels() {
  static constexpr ReplayKernels kernels = table_of("avx512");
  __builtin_cpu_init();
  const bool present = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  return present ? &kernels : nullptr;
}

}  // namespace pearl

#endif
