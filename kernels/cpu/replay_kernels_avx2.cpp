// The Replay Manager's hot loops in AVX2: four 64-bit lanes, integer arithmetic alone but for exact conversions.
// Instruction sets are given function by function, so that no shared inline function is compiled with them.
#include "pearl/replay_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <bit>
#include <cstring>

#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/tree_descent.hpp"

#define PEARL_AVX2 __attribute__((target("avx2,bmi2,popcnt")))

namespace pearl {
namespace {

constexpr std::size_t kLanes = 4;

PEARL_AVX2 inline __m256i constant(std::int64_t value) { return _mm256_set1_epi64x(value); }
PEARL_AVX2 inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
PEARL_AVX2 inline void store(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

// a * b modulo 2^64, b within the signed 32 bits.
PEARL_AVX2 inline __m256i times_narrow(__m256i a, __m256i b) {
  return _mm256_add_epi64(_mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), 32),
                          _mm256_mul_epu32(a, b));
}

template <int Bits>
PEARL_AVX2 inline __m256i shift_right_signed(__m256i a) {
  const __m256i biased = _mm256_xor_si256(a, constant(INT64_MIN));
  return _mm256_sub_epi64(_mm256_srli_epi64(biased, Bits), constant(std::int64_t{1} << (63 - Bits)));
}

PEARL_AVX2 inline __m256i log2_of(__m256i fraction, __m256i exponent) {
  __m256i acc = constant(kLog2Coefficients[9]);
  for (int i = 8; i >= 0; --i)
    acc = _mm256_add_epi64(constant(kLog2Coefficients[i]), shift_right_signed<27>(times_narrow(acc, fraction)));
  return _mm256_add_epi64(_mm256_slli_epi64(exponent, 32), shift_right_signed<30>(times_narrow(acc, fraction)));
}

PEARL_AVX2 inline __m256i exp2_of(__m256i fraction) {
  __m256i acc = constant(static_cast<std::int64_t>(kExp2Coefficients[5]));
  for (int i = 4; i >= 0; --i)
    acc = _mm256_add_epi64(constant(static_cast<std::int64_t>(kExp2Coefficients[i])),
                           _mm256_srli_epi64(_mm256_mul_epu32(acc, fraction), 32));
  return _mm256_add_epi64(constant(std::int64_t{1} << 31), _mm256_srli_epi64(_mm256_mul_epu32(acc, fraction), 32));
}

// The exponent is at most 2^30.
PEARL_AVX2 inline __m256i power_of(__m256i log2, __m256i exponent) {
  return shift_right_signed<20>(times_narrow(shift_right_signed<8>(log2), exponent));
}

// The low halves of four 64-bit lanes.
PEARL_AVX2 inline __m128i narrowed(__m256i wide) {
  return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(wide, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
}

PEARL_AVX2 inline __m128i quantised(__m128i bits, __m256i alpha, __m128i unscaled) {
  // A subnormal is its mantissa times 2^-149, and every mantissa is a normal float.
  const __m128i subnormal = _mm_cmplt_epi32(bits, _mm_set1_epi32(0x800000));
  const __m128i normal = _mm_blendv_epi8(bits, _mm_castps_si128(_mm_cvtepi32_ps(bits)), subnormal);
  const __m256i fraction =
      _mm256_cvtepu32_epi64(_mm_slli_epi32(_mm_and_si128(normal, _mm_set1_epi32(0x7FFFFF)), 4));
  __m128i exponent = _mm_sub_epi32(_mm_srli_epi32(normal, 23), _mm_set1_epi32(127));
  exponent = _mm_sub_epi32(exponent, _mm_and_si128(subnormal, _mm_set1_epi32(149)));
  const __m256i y = power_of(log2_of(fraction, _mm256_cvtepi32_epi64(exponent)), alpha);
  // Beyond these bounds the clipping below decides, as round_scaled() and quantise() do.
  __m128i short_shift = _mm_sub_epi32(unscaled, narrowed(_mm256_srli_epi64(y, 32)));
  short_shift = _mm_min_epi32(_mm_max_epi32(short_shift, _mm_set1_epi32(3)), _mm_set1_epi32(34));
  const __m256i shift = _mm256_cvtepu32_epi64(short_shift);
  const __m256i half = _mm256_sllv_epi64(constant(1), _mm256_sub_epi64(shift, constant(1)));
  const __m256i value = exp2_of(_mm256_and_si256(y, constant(0xFFFFFFFF)));
  __m128i leaf = narrowed(_mm256_srlv_epi64(_mm256_add_epi64(value, half), shift));
  leaf = _mm_min_epi32(_mm_max_epi32(leaf, _mm_set1_epi32(1)), _mm_set1_epi32(static_cast<int>(kLeafMax)));
  leaf = _mm_blendv_epi8(leaf, _mm_set1_epi32(static_cast<int>(kLeafMax)),
                         _mm_cmpgt_epi32(bits, _mm_set1_epi32(0x7F7FFFFF)));
  return _mm_and_si128(leaf, _mm_cmpgt_epi32(bits, _mm_setzero_si128()));
}

PEARL_AVX2 void quantise_all(const float* priorities, std::size_t count, std::int64_t alpha_q28, int scale,
                             std::uint32_t* leaves) {
  const __m256i alpha = constant(alpha_q28);
  const __m128i unscaled = _mm_set1_epi32(31 - scale);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(priorities + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(leaves + i), quantised(bits, alpha, unscaled));
  }
  for (; i < count; ++i) leaves[i] = quantise(priorities[i], alpha_q28, scale);
}

PEARL_AVX2 std::uint32_t smallest(const std::uint32_t* leaves, std::size_t count) {
  __m256i least = _mm256_set1_epi32(-1);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) least = _mm256_min_epu32(least, load(leaves + i));
  alignas(32) std::uint32_t lanes[8];
  store(lanes, least);
  std::uint32_t smallest = ~0u;
  for (const std::uint32_t lane : lanes) smallest = lane < smallest ? lane : smallest;
  for (; i < count; ++i) smallest = leaves[i] < smallest ? leaves[i] : smallest;
  return smallest;
}

PEARL_AVX2 void weights_of(const std::uint32_t* leaves, std::size_t count, std::uint32_t smallest,
                           std::int64_t beta_q28, float* weights) {
  const std::int64_t least = log2_q32(smallest);
  const __m256i log2_min = constant(least);
  const __m256i beta = constant(beta_q28);
  const __m256i two52 = constant(0x4330000000000000);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i leaf = _mm_loadu_si128(reinterpret_cast<const __m128i*>(leaves + i));
    const __m256i exact = _mm256_castpd_si256(_mm256_cvtepi32_pd(leaf));
    const __m256i fraction = _mm256_and_si256(_mm256_srli_epi64(exact, 25), constant((1 << 27) - 1));
    const __m256i exponent = _mm256_sub_epi64(_mm256_srli_epi64(exact, 52), constant(1023));
    const __m256i y = power_of(_mm256_sub_epi64(log2_min, log2_of(fraction, exponent)), beta);
    const __m256i value = exp2_of(_mm256_and_si256(y, constant(0xFFFFFFFF)));
    // To double exactly, then rounded once to float.
    const __m256d wide =
        _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(value, two52)), _mm256_castsi256_pd(two52));
    const __m128i power =
        _mm_slli_epi32(_mm_add_epi32(narrowed(_mm256_srli_epi64(y, 32)), _mm_set1_epi32(127)), 23);
    const __m128 weight =
        _mm_mul_ps(_mm_mul_ps(_mm256_cvtpd_ps(wide), _mm_set1_ps(0x1p-31f)), _mm_castsi128_ps(power));
    _mm_storeu_ps(weights + i, weight);
  }
  for (; i < count; ++i) weights[i] = importance_weight(least, log2_q32(leaves[i]), beta_q28);
}

// mulhi64() lane by lane; the halves of b come apart.
PEARL_AVX2 inline __m256i mulhi(__m256i a, __m256i b_low, __m256i b_high) {
  const __m256i mask = constant(0xFFFFFFFF);
  const __m256i a_high = _mm256_srli_epi64(a, 32);
  const __m256i middle = _mm256_add_epi64(_mm256_mul_epu32(a_high, b_low),
                                          _mm256_srli_epi64(_mm256_mul_epu32(a, b_low), 32));
  const __m256i other = _mm256_add_epi64(_mm256_mul_epu32(a, b_high), _mm256_and_si256(middle, mask));
  return _mm256_add_epi64(_mm256_add_epi64(_mm256_mul_epu32(a_high, b_high), _mm256_srli_epi64(middle, 32)),
                          _mm256_srli_epi64(other, 32));
}

PEARL_AVX2 void targets_of(std::uint64_t seed, std::uint64_t call, std::uint64_t lanes, std::uint64_t first,
                           std::size_t count, std::uint64_t total, std::uint64_t* targets) {
  constexpr std::size_t kBlock = 2 * kLanes;  // lanes of one vector of pairs
  const std::size_t whole = lanes == 1 ? 0 : count / kBlock * kBlock;
  const std::uint64_t width = whole == 0 ? 0 : stratum_width(lanes);
  const __m256i mask = constant(0xFFFFFFFF);
  const __m256i width_low = constant(static_cast<std::int64_t>(width & 0xFFFFFFFFu));
  const __m256i width_high = constant(static_cast<std::int64_t>(width >> 32));
  const __m256i total_low = constant(static_cast<std::int64_t>(total & 0xFFFFFFFFu));
  const __m256i total_high = constant(static_cast<std::int64_t>(total >> 32));
  const __m256i multiplier0 = constant(0xD2511F53);
  const __m256i multiplier1 = constant(0xCD9E8D57);
  const __m256i call_low = constant(static_cast<std::int64_t>(call & 0xFFFFFFFFu));
  const __m256i call_high = constant(static_cast<std::int64_t>(call >> 32));
  const __m256i ramp = _mm256_setr_epi64x(0, 1, 2, 3);
  const __m256i ramp_width =
      _mm256_setr_epi64x(0, static_cast<std::int64_t>(2 * width), static_cast<std::int64_t>(4 * width),
                         static_cast<std::int64_t>(6 * width));
  for (std::size_t at = 0; at < whole; at += kBlock) {
    const std::uint64_t lane = first + at;
    const __m256i pair = _mm256_add_epi64(constant(static_cast<std::int64_t>(lane / 2)), ramp);
    // Words are the low halves of 64-bit lanes; what stands above them is never read.
    __m256i word0 = pair, word1 = _mm256_srli_epi64(pair, 32), word2 = call_low, word3 = call_high;
    std::uint32_t key0 = static_cast<std::uint32_t>(seed);
    std::uint32_t key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const __m256i product0 = _mm256_mul_epu32(word0, multiplier0);
      const __m256i product1 = _mm256_mul_epu32(word2, multiplier1);
      word0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), word1), constant(key0));
      word2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), word3), constant(key1));
      word1 = product1;
      word3 = product0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const __m256i random0 = _mm256_or_si256(_mm256_and_si256(word0, mask), _mm256_slli_epi64(word1, 32));
    const __m256i random1 = _mm256_or_si256(_mm256_and_si256(word2, mask), _mm256_slli_epi64(word3, 32));
    const __m256i start = _mm256_add_epi64(constant(static_cast<std::int64_t>(lane * width)), ramp_width);
    const __m256i x0 = _mm256_add_epi64(start, mulhi(random0, width_low, width_high));
    const __m256i x1 = _mm256_add_epi64(_mm256_add_epi64(start, constant(static_cast<std::int64_t>(width))),
                                        mulhi(random1, width_low, width_high));
    const __m256i target0 = mulhi(x0, total_low, total_high);
    const __m256i target1 = mulhi(x1, total_low, total_high);
    const __m256i even = _mm256_unpacklo_epi64(target0, target1);
    const __m256i odd = _mm256_unpackhi_epi64(target0, target1);
    store(targets + at, _mm256_permute2x128_si256(even, odd, 0x20));
    store(targets + at + kLanes, _mm256_permute2x128_si256(even, odd, 0x31));
  }
  if (whole < count)
    plain_replay_kernels().targets(seed, call, lanes, first + whole, count - whole, total, targets + whole);
}

PEARL_AVX2 inline unsigned count_of(int mask) {
  return static_cast<unsigned>(_mm_popcnt_u32(static_cast<unsigned>(mask)));
}

// Among four, whose sums these are.
PEARL_AVX2 inline unsigned pick_of_four(__m256i sums, std::uint64_t& target) {
  alignas(32) std::uint64_t before[8];
  const __m256i zero = _mm256_setzero_si256();
  sums = _mm256_add_epi64(sums, _mm256_blend_epi32(_mm256_permute4x64_epi64(sums, 0x90), zero, 0x03));
  sums = _mm256_add_epi64(sums, _mm256_permute2x128_si256(sums, sums, 0x08));
  const __m256i sign = constant(INT64_MIN);
  const __m256i wanted = constant(static_cast<std::int64_t>(target ^ (std::uint64_t{1} << 63)));
  const int beyond = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_xor_si256(sums, sign), wanted)));
  before[3] = 0;
  _mm256_store_si256(reinterpret_cast<__m256i*>(before + 4), sums);
  const unsigned pick = 4 - count_of(beyond);
  target -= before[3 + pick];
  return pick;
}

// The sums of each of four vectors' lanes.
PEARL_AVX2 inline __m256i sums_of_four(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  const __m256i cd = _mm256_add_epi64(_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
  return _mm256_add_epi64(_mm256_permute2x128_si256(ab, cd, 0x20), _mm256_permute2x128_si256(ab, cd, 0x31));
}

PEARL_AVX2 inline std::uint64_t sum_of_sixteen(const std::uint64_t* siblings) {
  const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(load(siblings), load(siblings + 4)),
                                       _mm256_add_epi64(load(siblings + 8), load(siblings + 12)));
  const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(half, _mm_unpackhi_epi64(half, half))));
}

template <unsigned K>
PEARL_AVX2 inline unsigned pick_node(const std::uint64_t* siblings, std::uint64_t& target) {
  if constexpr (K == 2) {
    return pick_among<2>(siblings, target);
  } else if constexpr (K == 4) {
    return pick_of_four(load(siblings), target);
  } else if constexpr (K == 8) {
    const std::uint64_t left = (siblings[0] + siblings[1]) + (siblings[2] + siblings[3]);
    const std::uint64_t right = left <= target;  // arithmetic, since a branch would be mispredicted
    target -= left & (0 - right);
    const unsigned first = 4 * static_cast<unsigned>(right);
    return first + pick_of_four(load(siblings + first), target);
  } else if constexpr (K == 16) {
    const __m256i quarters =
        sums_of_four(load(siblings), load(siblings + 4), load(siblings + 8), load(siblings + 12));
    const unsigned first = 4 * pick_of_four(quarters, target);
    return first + pick_of_four(load(siblings + first), target);
  } else if constexpr (K >= 64) {
    // Half of so many need not be read, which is worth a mispredicted branch.
    unsigned first = 0;
    for (; first + 16 < K; first += 16) {
      const std::uint64_t sum = sum_of_sixteen(siblings + first);
      if (target < sum) break;
      target -= sum;
    }
    return first + pick_node<16>(siblings + first, target);
  } else {
    // First the sixteen, then the child.
    std::uint64_t sixteens[K / 16];
    for (unsigned i = 0; i < K / 16; ++i) sixteens[i] = sum_of_sixteen(siblings + 16 * i);
    const unsigned first = 16 * pick_among<K / 16>(sixteens, target);
    return first + pick_node<16>(siblings + first, target);
  }
}

// Prefix sums of 32-bit lanes within each half.
PEARL_AVX2 inline __m256i half_prefix_sums(__m256i sums) {
  sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 4));
  return _mm256_add_epi32(sums, _mm256_slli_si256(sums, 8));
}

PEARL_AVX2 inline __m256i prefix_sums_of_leaves(__m256i leaves) {
  const __m256i sums = half_prefix_sums(leaves);
  return _mm256_add_epi32(sums, _mm256_shuffle_epi32(_mm256_permute2x128_si256(sums, sums, 0x08), 0xFF));
}

PEARL_AVX2 inline unsigned passed_lanes(__m256i sums, __m256i target) {
  return static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(sums, target), target))));
}

// Sixteen leaves of 28 bits sum to less than 2^32.
template <unsigned K>
PEARL_AVX2 inline unsigned pick_leaf(const std::uint32_t* siblings, std::uint64_t& target) {
  if constexpr (K <= 4) {
    return pick_among<K>(siblings, target);
  } else if constexpr (K == 8) {
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(target));
    return static_cast<unsigned>(_mm_popcnt_u32(passed_lanes(prefix_sums_of_leaves(load(siblings)), wanted)));
  } else if constexpr (K == 16) {
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(target));
    const __m256i low = prefix_sums_of_leaves(load(siblings));
    const __m256i high = _mm256_add_epi32(prefix_sums_of_leaves(load(siblings + 8)),
                                          _mm256_permutevar8x32_epi32(low, _mm256_set1_epi32(7)));
    return static_cast<unsigned>(_mm_popcnt_u32(passed_lanes(low, wanted) | passed_lanes(high, wanted) << 8));
  } else {
    std::uint32_t sixteens[K / 16];
    for (unsigned i = 0; i < K / 16; ++i) {
      const __m256i sum = _mm256_add_epi32(load(siblings + 16 * i), load(siblings + 16 * i + 8));
      __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
      half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
      half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1));
      sixteens[i] = static_cast<std::uint32_t>(_mm_cvtsi128_si32(half));
    }
    const unsigned first = 16 * pick_among<K / 16>(sixteens, target);
    return first + pick_leaf<16>(siblings + first, target);
  }
}

PEARL_AVX2 PriorityScan scan(const float* priorities, std::size_t count) { return scan_of(priorities, count); }

PEARL_AVX2 bool all_below(const std::int64_t* indices, std::size_t count, std::size_t end) {
  return all_below_of(indices, count, end);
}

template <unsigned K>
PEARL_AVX2 void find(const TreeLevels& tree, std::size_t level, std::uint64_t* rest, std::size_t count, std::int64_t* places,
                     std::uint32_t* values) {
  PEARL_DESCEND(K, pick_node, pick_leaf)
}

constexpr ReplayKernels kKernels = {
    "avx2",
    quantise_all,
    smallest,
    weights_of,
    targets_of,
    scan,
    all_below,
    {nullptr, find<2>, find<4>, find<8>, find<16>, find<32>, find<64>, find<128>, find<256>}};

}  // namespace

const ReplayKernels* avx2_replay_kernels() {
  __builtin_cpu_init();
  const bool present =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  return present ? &kKernels : nullptr;
}

}  // namespace pearl

#else

namespace pearl {
const ReplayKernels* avx2_replay_kernels() { return nullptr; }
}  // namespace pearl

#endif
