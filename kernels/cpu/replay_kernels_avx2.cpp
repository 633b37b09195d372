// The Replay Manager's hot loops in AVX2: four 64-bit lanes.
#include "pearl/replay_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/tree_descent.hpp"

#define PEARL_SIMD __attribute__((target("avx2,bmi2,popcnt")))
#define PEARL_OP PEARL_SIMD inline __attribute__((always_inline))

namespace pearl {
namespace {

constexpr std::size_t kLanes = 4;
constexpr int kVectors = 1;
constexpr bool kPartial = false;
constexpr unsigned kSkipping = 64;

using Wide = __m256i;
using Half = __m128i;
using Small = Half;
using Mask = Half;
using Floats = __m128;

PEARL_OP Wide constant(std::int64_t value) { return _mm256_set1_epi64x(value); }
PEARL_OP Wide multiples_of(std::uint64_t step) {
  return _mm256_setr_epi64x(0, static_cast<std::int64_t>(step), static_cast<std::int64_t>(2 * step),
                            static_cast<std::int64_t>(3 * step));
}
PEARL_OP Wide load(const void* from) { return _mm256_loadu_si256(static_cast<const Wide*>(from)); }
PEARL_OP void store(void* to, Wide value) { _mm256_storeu_si256(static_cast<Wide*>(to), value); }
PEARL_OP Wide add(Wide a, Wide b) { return _mm256_add_epi64(a, b); }
PEARL_OP Wide subtract(Wide a, Wide b) { return _mm256_sub_epi64(a, b); }
PEARL_OP Wide bit_and(Wide a, Wide b) { return _mm256_and_si256(a, b); }
PEARL_OP Wide bit_or(Wide a, Wide b) { return _mm256_or_si256(a, b); }
PEARL_OP Wide bit_xor(Wide a, Wide b, Wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
template <int Bits>
PEARL_OP Wide shift_left(Wide a) { return _mm256_slli_epi64(a, Bits); }
template <int Bits>
PEARL_OP Wide shift_right(Wide a) { return _mm256_srli_epi64(a, Bits); }
template <int Bits>
PEARL_OP Wide shift_right_signed(Wide a) {
  const Wide biased = _mm256_xor_si256(a, constant(INT64_MIN));
  return subtract(shift_right<Bits>(biased), constant(std::int64_t{1} << (63 - Bits)));
}
PEARL_OP Wide shift_left_by(Wide a, Wide bits) { return _mm256_sllv_epi64(a, bits); }
PEARL_OP Wide shift_right_by(Wide a, Wide bits) { return _mm256_srlv_epi64(a, bits); }
// The products of the lower halves.
PEARL_OP Wide multiply_halves(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
// a * b modulo 2^64, b a signed 32-bit number.
PEARL_OP Wide multiply_narrow(Wide a, Wide b) {
  return add(shift_left<32>(multiply_halves(shift_right<32>(a), b)), multiply_halves(a, b));
}

PEARL_OP Half every_half(int value) { return _mm_set1_epi32(value); }
PEARL_OP Half load_half(const void* from, std::size_t, int) {
  return _mm_loadu_si128(static_cast<const Half*>(from));
}
PEARL_OP void store_half(void* to, std::size_t, Half value) { _mm_storeu_si128(static_cast<Half*>(to), value); }
PEARL_OP Half add(Half a, Half b) { return _mm_add_epi32(a, b); }
PEARL_OP Half subtract(Half a, Half b) { return _mm_sub_epi32(a, b); }
PEARL_OP Half bit_and(Half a, Half b) { return _mm_and_si128(a, b); }
template <int Bits>
PEARL_OP Half shift_left(Half a) { return _mm_slli_epi32(a, Bits); }
template <int Bits>
PEARL_OP Half shift_right(Half a) { return _mm_srli_epi32(a, Bits); }
PEARL_OP Mask below(Half a, int bound) { return _mm_cmplt_epi32(a, every_half(bound)); }
PEARL_OP Mask above(Half a, int bound) { return _mm_cmpgt_epi32(a, every_half(bound)); }
PEARL_OP Half where(Mask mask, Half then, Half otherwise) { return _mm_blendv_epi8(otherwise, then, mask); }
PEARL_OP Half zero_unless(Mask mask, Half value) { return _mm_and_si128(value, mask); }

PEARL_OP Small small(int value) { return every_half(value); }
PEARL_OP Small clip(Small a, int least, int most) {
  return _mm_min_epi32(_mm_max_epi32(a, small(least)), small(most));
}
PEARL_OP Small subtract_where(Mask mask, Small a, Small b) { return subtract(a, bit_and(mask, b)); }
PEARL_OP Small half_to_small(Half a) { return a; }
PEARL_OP Half small_to_half(Small a) { return a; }
PEARL_OP Wide to_wide(Small a) { return _mm256_cvtepi32_epi64(a); }
PEARL_OP Small to_small(Wide a) {
  return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
}
PEARL_OP Small upper_halves(Wide a) { return to_small(shift_right<32>(a)); }

PEARL_OP Floats every_float(float value) { return _mm_set1_ps(value); }
PEARL_OP Floats multiply(Floats a, Floats b) { return _mm_mul_ps(a, b); }
PEARL_OP Floats as_floats(Half bits) { return _mm_castsi128_ps(bits); }
PEARL_OP Half as_half(Floats a) { return _mm_castps_si128(a); }
PEARL_OP Half converted_to_float(Half a) { return as_half(_mm_cvtepi32_ps(a)); }
PEARL_OP Wide bits_as_double(Half a) { return _mm256_castpd_si256(_mm256_cvtepi32_pd(a)); }
// Numbers below 2^52: exact as doubles, then rounded once to float.
PEARL_OP Floats rounded_to_float(Wide a) {
  const Wide two52 = constant(0x4330000000000000);
  return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_castsi256_pd(bit_or(a, two52)), _mm256_castsi256_pd(two52)));
}

// Stores a[0], b[0], a[1], b[1] and so on.
PEARL_OP void store_pairs(std::uint64_t* to, std::size_t, Wide a, Wide b) {
  const Wide even = _mm256_unpacklo_epi64(a, b);
  const Wide odd = _mm256_unpackhi_epi64(a, b);
  store(to, _mm256_permute2x128_si256(even, odd, 0x20));
  store(to + kLanes, _mm256_permute2x128_si256(even, odd, 0x31));
}

PEARL_SIMD std::uint32_t smallest(const std::uint32_t* leaves, std::size_t count) {
  Wide least = _mm256_set1_epi32(-1);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) least = _mm256_min_epu32(least, load(leaves + i));
  alignas(32) std::uint32_t lanes[8];
  store(lanes, least);
  std::uint32_t smallest = ~0u;
  for (const std::uint32_t lane : lanes) smallest = lane < smallest ? lane : smallest;
  for (; i < count; ++i) smallest = leaves[i] < smallest ? leaves[i] : smallest;
  return smallest;
}

// Picks among four siblings with these sums.
PEARL_SIMD inline unsigned pick_of_four(Wide sums, std::uint64_t& target) {
  alignas(32) std::uint64_t before[8];
  const Wide zero = _mm256_setzero_si256();
  sums = add(sums, _mm256_blend_epi32(_mm256_permute4x64_epi64(sums, 0x90), zero, 0x03));
  sums = add(sums, _mm256_permute2x128_si256(sums, sums, 0x08));
  const Wide sign = constant(INT64_MIN);
  const Wide wanted = constant(static_cast<std::int64_t>(target ^ (std::uint64_t{1} << 63)));
  const int beyond = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_xor_si256(sums, sign), wanted)));
  before[3] = 0;
  _mm256_store_si256(reinterpret_cast<Wide*>(before + 4), sums);
  const unsigned pick = 4 - static_cast<unsigned>(_mm_popcnt_u32(static_cast<unsigned>(beyond)));
  target -= before[3 + pick];
  return pick;
}

// The sums of each of four vectors' lanes.
PEARL_SIMD inline Wide sums_of_four(Wide a, Wide b, Wide c, Wide d) {
  const Wide ab = add(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  const Wide cd = add(_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
  return add(_mm256_permute2x128_si256(ab, cd, 0x20), _mm256_permute2x128_si256(ab, cd, 0x31));
}

template <unsigned K>
PEARL_SIMD inline unsigned pick_of_few(const std::uint64_t* siblings, std::uint64_t& target) {
  if constexpr (K == 4) {
    return pick_of_four(load(siblings), target);
  } else if constexpr (K == 8) {
    const std::uint64_t left = (siblings[0] + siblings[1]) + (siblings[2] + siblings[3]);
    const std::uint64_t right = left <= target;  // arithmetic, since a branch would be mispredicted
    target -= left & (0 - right);
    const unsigned first = 4 * static_cast<unsigned>(right);
    return first + pick_of_four(load(siblings + first), target);
  } else {
    const Wide quarters = sums_of_four(load(siblings), load(siblings + 4), load(siblings + 8), load(siblings + 12));
    const unsigned first = 4 * pick_of_four(quarters, target);
    return first + pick_of_four(load(siblings + first), target);
  }
}

PEARL_SIMD inline std::uint64_t sum_of_sixteen(const std::uint64_t* siblings) {
  const Wide sum = add(add(load(siblings), load(siblings + 4)), add(load(siblings + 8), load(siblings + 12)));
  const Half half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(half, _mm_unpackhi_epi64(half, half))));
}

PEARL_SIMD inline std::uint32_t sum_of_sixteen(const std::uint32_t* siblings) {
  const Wide sum = _mm256_add_epi32(load(siblings), load(siblings + 8));
  Half half = add(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  half = add(half, _mm_shuffle_epi32(half, 0x4E));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(add(half, _mm_shuffle_epi32(half, 0xB1))));
}

// The prefix sums of eight leaves: first within each half.
PEARL_SIMD inline Wide prefix_sums_of_leaves(Wide sums) {
  sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 4));
  sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 8));
  return _mm256_add_epi32(sums, _mm256_shuffle_epi32(_mm256_permute2x128_si256(sums, sums, 0x08), 0xFF));
}

PEARL_SIMD inline unsigned at_most(Wide sums, Wide target) {
  return static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(sums, target), target))));
}

// One bit per leaf whose prefix sum is at most the target.
template <unsigned K>
PEARL_SIMD inline unsigned leaves_passed(const std::uint32_t* siblings, int target) {
  const Wide wanted = _mm256_set1_epi32(target);
  const Wide low = prefix_sums_of_leaves(load(siblings));
  if constexpr (K == 8) {
    return at_most(low, wanted);
  } else {
    const Wide high = _mm256_add_epi32(prefix_sums_of_leaves(load(siblings + 8)),
                                       _mm256_permutevar8x32_epi32(low, _mm256_set1_epi32(7)));
    return at_most(low, wanted) | at_most(high, wanted) << 8;
  }
}

#include "replay_kernels_body.hpp"

}  // namespace

const ReplayKernels* avx2_replay_kernels() {
  static constexpr ReplayKernels kernels = table_of("avx2");
  __builtin_cpu_init();
  const bool present =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  return present ? &kernels : nullptr;
}

}  // namespace pearl

#endif
