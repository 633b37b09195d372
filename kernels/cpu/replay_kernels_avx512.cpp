// The Replay Manager's hot loops in AVX-512: eight 64-bit lanes, integer arithmetic alone but for exact conversions.
// Instruction sets are given function by function, so that no shared inline function is compiled with them.
#include "pearl/replay_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <bit>
#include <cstring>

#include "pearl/philox.hpp"
#include "pearl/quantise.hpp"
#include "pearl/tree_descent.hpp"

#define PEARL_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,bmi2,popcnt")))

namespace pearl {
namespace {

constexpr std::size_t kLanes = 8;

PEARL_AVX512 inline __m512i constant(std::int64_t value) { return _mm512_set1_epi64(value); }

PEARL_AVX512 inline __mmask8 first_lanes(std::size_t count) {
  return static_cast<__mmask8>(count < kLanes ? (1u << count) - 1 : 0xFFu);
}

PEARL_AVX512 inline __mmask8 lanes_from(std::size_t first, std::size_t count) {
  return count > first ? first_lanes(count - first) : __mmask8{0};
}

// Several vectors at once: one alone is a chain of dependent instructions longer than processors look ahead.
constexpr int kVectors = 4;

template <int N>
PEARL_AVX512 inline void log2_of(const __m512i (&fraction)[N], const __m512i (&exponent)[N], __m512i (&log2)[N]) {
  for (int n = 0; n < N; ++n) log2[n] = constant(kLog2Coefficients[9]);
  for (int i = 8; i >= 0; --i)
    for (int n = 0; n < N; ++n)
      log2[n] = _mm512_add_epi64(constant(kLog2Coefficients[i]),
                                 _mm512_srai_epi64(_mm512_mullo_epi64(log2[n], fraction[n]), 27));
  for (int n = 0; n < N; ++n)
    log2[n] = _mm512_add_epi64(_mm512_slli_epi64(exponent[n], 32),
                               _mm512_srai_epi64(_mm512_mullo_epi64(log2[n], fraction[n]), 30));
}

// Of the lower halves of y.
template <int N>
PEARL_AVX512 inline void exp2_of(const __m512i (&y)[N], __m512i (&value)[N]) {
  for (int n = 0; n < N; ++n) value[n] = constant(static_cast<std::int64_t>(kExp2Coefficients[5]));
  for (int i = 4; i >= 0; --i)
    for (int n = 0; n < N; ++n)
      value[n] = _mm512_add_epi64(constant(static_cast<std::int64_t>(kExp2Coefficients[i])),
                                  _mm512_srli_epi64(_mm512_mul_epu32(value[n], y[n]), 32));
  for (int n = 0; n < N; ++n)
    value[n] = _mm512_add_epi64(constant(std::int64_t{1} << 31),
                                _mm512_srli_epi64(_mm512_mul_epu32(value[n], y[n]), 32));
}

PEARL_AVX512 inline __m512i power_of(__m512i log2, __m512i exponent) {
  return _mm512_srai_epi64(_mm512_mullo_epi64(_mm512_srai_epi64(log2, 8), exponent), 20);
}

// The first `count` of N vectors.
template <int N>
PEARL_AVX512 inline void quantise_some(const float* priorities, std::size_t count, __m512i alpha, __m512i unscaled,
                                       std::uint32_t* leaves) {
  __m256i bits[N];
  __m512i fraction[N], exponent[N], y[N], value[N];
  for (int n = 0; n < N; ++n) {
    bits[n] = _mm256_maskz_loadu_epi32(lanes_from(n * kLanes, count), priorities + n * kLanes);
    // A subnormal is its mantissa times 2^-149, and every mantissa is a normal float.
    const __mmask8 subnormal = _mm256_cmplt_epi32_mask(bits[n], _mm256_set1_epi32(0x800000));
    const __m256i normal =
        _mm256_mask_mov_epi32(bits[n], subnormal, _mm256_castps_si256(_mm256_cvtepi32_ps(bits[n])));
    const __m512i wide = _mm512_cvtepu32_epi64(normal);
    fraction[n] = _mm512_slli_epi64(_mm512_and_si512(wide, constant(0x7FFFFF)), 4);
    exponent[n] = _mm512_sub_epi64(_mm512_srli_epi64(wide, 23), constant(127));
    exponent[n] = _mm512_mask_sub_epi64(exponent[n], subnormal, exponent[n], constant(149));
  }
  log2_of(fraction, exponent, y);
  for (int n = 0; n < N; ++n) y[n] = power_of(y[n], alpha);
  exp2_of(y, value);
  for (int n = 0; n < N; ++n) {
    // Beyond these bounds the clipping below decides, as round_scaled() and quantise() do.
    __m512i shift = _mm512_sub_epi64(unscaled, _mm512_srai_epi64(y[n], 32));
    shift = _mm512_min_epi64(_mm512_max_epi64(shift, constant(3)), constant(34));
    const __m512i half = _mm512_sllv_epi64(constant(1), _mm512_sub_epi64(shift, constant(1)));
    __m512i leaf = _mm512_srlv_epi64(_mm512_add_epi64(value[n], half), shift);
    leaf = _mm512_min_epi64(_mm512_max_epi64(leaf, constant(1)), constant(kLeafMax));
    __m256i narrow = _mm512_cvtepi64_epi32(leaf);
    narrow = _mm256_mask_mov_epi32(narrow, _mm256_cmpgt_epi32_mask(bits[n], _mm256_set1_epi32(0x7F7FFFFF)),
                                   _mm256_set1_epi32(static_cast<int>(kLeafMax)));
    narrow = _mm256_maskz_mov_epi32(_mm256_cmpgt_epi32_mask(bits[n], _mm256_setzero_si256()), narrow);
    _mm256_mask_storeu_epi32(leaves + n * kLanes, lanes_from(n * kLanes, count), narrow);
  }
}

PEARL_AVX512 void quantise_all(const float* priorities, std::size_t count, std::int64_t alpha_q28, int scale,
                               std::uint32_t* leaves) {
  const __m512i alpha = constant(alpha_q28);
  const __m512i unscaled = constant(31 - std::int64_t{scale});
  std::size_t i = 0;
  for (; i + kLanes < count; i += kVectors * kLanes)
    quantise_some<kVectors>(priorities + i, count - i, alpha, unscaled, leaves + i);
  if (i < count) quantise_some<1>(priorities + i, count - i, alpha, unscaled, leaves + i);
}

PEARL_AVX512 std::uint32_t smallest(const std::uint32_t* leaves, std::size_t count) {
  __m512i least = _mm512_set1_epi32(-1);
  for (std::size_t i = 0; i < count; i += 16) {
    const auto lanes = static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xFFFFu);
    least = _mm512_mask_min_epu32(least, lanes, least, _mm512_maskz_loadu_epi32(lanes, leaves + i));
  }
  return _mm512_reduce_min_epu32(least);
}

// The first `count` of N vectors.
template <int N>
PEARL_AVX512 inline void weigh_some(const std::uint32_t* leaves, std::size_t count, __m512i log2_min, __m512i beta,
                                    float* weights) {
  __m512i fraction[N], exponent[N], y[N], value[N];
  for (int n = 0; n < N; ++n) {
    const __m256i leaf =
        _mm256_mask_loadu_epi32(_mm256_set1_epi32(1), lanes_from(n * kLanes, count), leaves + n * kLanes);
    const __m512i exact = _mm512_castpd_si512(_mm512_cvtepi32_pd(leaf));
    fraction[n] = _mm512_and_si512(_mm512_srli_epi64(exact, 25), constant((1 << 27) - 1));
    exponent[n] = _mm512_sub_epi64(_mm512_srli_epi64(exact, 52), constant(1023));
  }
  log2_of(fraction, exponent, y);
  for (int n = 0; n < N; ++n) y[n] = power_of(_mm512_sub_epi64(log2_min, y[n]), beta);
  exp2_of(y, value);
  for (int n = 0; n < N; ++n) {
    const __m256i power = _mm256_slli_epi32(
        _mm256_add_epi32(_mm512_cvtepi64_epi32(_mm512_srai_epi64(y[n], 32)), _mm256_set1_epi32(127)), 23);
    const __m256 weight = _mm256_mul_ps(_mm256_mul_ps(_mm512_cvtepu64_ps(value[n]), _mm256_set1_ps(0x1p-31f)),
                                        _mm256_castsi256_ps(power));
    _mm256_mask_storeu_ps(weights + n * kLanes, lanes_from(n * kLanes, count), weight);
  }
}

PEARL_AVX512 void weights_of(const std::uint32_t* leaves, std::size_t count, std::uint32_t smallest,
                             std::int64_t beta_q28, float* weights) {
  const __m512i log2_min = constant(log2_q32(smallest));
  const __m512i beta = constant(beta_q28);
  std::size_t i = 0;
  for (; i + kLanes < count; i += kVectors * kLanes)
    weigh_some<kVectors>(leaves + i, count - i, log2_min, beta, weights + i);
  if (i < count) weigh_some<1>(leaves + i, count - i, log2_min, beta, weights + i);
}

// mulhi64() lane by lane; the halves of b come apart.
PEARL_AVX512 inline __m512i mulhi(__m512i a, __m512i b_low, __m512i b_high) {
  const __m512i mask = constant(0xFFFFFFFF);
  const __m512i a_high = _mm512_srli_epi64(a, 32);
  const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(a_high, b_low),
                                          _mm512_srli_epi64(_mm512_mul_epu32(a, b_low), 32));
  const __m512i other = _mm512_add_epi64(_mm512_mul_epu32(a, b_high), _mm512_and_si512(middle, mask));
  return _mm512_add_epi64(_mm512_add_epi64(_mm512_mul_epu32(a_high, b_high), _mm512_srli_epi64(middle, 32)),
                          _mm512_srli_epi64(other, 32));
}

PEARL_AVX512 void targets_of(std::uint64_t seed, std::uint64_t call, std::uint64_t lanes, std::uint64_t first,
                             std::size_t count, std::uint64_t total, std::uint64_t* targets) {
  if (lanes == 1) return plain_replay_kernels().targets(seed, call, lanes, first, count, total, targets);
  constexpr std::size_t kBlock = 2 * kLanes;  // lanes of one vector of pairs
  const std::uint64_t width = stratum_width(lanes);
  const __m512i mask = constant(0xFFFFFFFF);
  const __m512i width_low = constant(static_cast<std::int64_t>(width & 0xFFFFFFFFu));
  const __m512i width_high = constant(static_cast<std::int64_t>(width >> 32));
  const __m512i total_low = constant(static_cast<std::int64_t>(total & 0xFFFFFFFFu));
  const __m512i total_high = constant(static_cast<std::int64_t>(total >> 32));
  const __m512i multiplier0 = constant(0xD2511F53);
  const __m512i multiplier1 = constant(0xCD9E8D57);
  const __m512i call_low = constant(static_cast<std::int64_t>(call & 0xFFFFFFFFu));
  const __m512i call_high = constant(static_cast<std::int64_t>(call >> 32));
  const __m512i low_half = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i high_half = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  const __m512i ramp = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i ramp_width = _mm512_mullo_epi64(ramp, constant(static_cast<std::int64_t>(2 * width)));
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::uint64_t lane = first + at;
    const __m512i pair = _mm512_add_epi64(constant(static_cast<std::int64_t>(lane / 2)), ramp);
    // Words are the low halves of 64-bit lanes; what stands above them is never read.
    __m512i word0 = pair, word1 = _mm512_srli_epi64(pair, 32), word2 = call_low, word3 = call_high;
    std::uint32_t key0 = static_cast<std::uint32_t>(seed);
    std::uint32_t key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const __m512i product0 = _mm512_mul_epu32(word0, multiplier0);
      const __m512i product1 = _mm512_mul_epu32(word2, multiplier1);
      word0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), word1, constant(key0), 0x96);
      word2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), word3, constant(key1), 0x96);
      word1 = product1;
      word3 = product0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const __m512i random0 = _mm512_or_si512(_mm512_and_si512(word0, mask), _mm512_slli_epi64(word1, 32));
    const __m512i random1 = _mm512_or_si512(_mm512_and_si512(word2, mask), _mm512_slli_epi64(word3, 32));
    const __m512i start = _mm512_add_epi64(constant(static_cast<std::int64_t>(lane * width)), ramp_width);
    const __m512i x0 = _mm512_add_epi64(start, mulhi(random0, width_low, width_high));
    const __m512i x1 = _mm512_add_epi64(_mm512_add_epi64(start, constant(static_cast<std::int64_t>(width))),
                                        mulhi(random1, width_low, width_high));
    const __m512i target0 = mulhi(x0, total_low, total_high);
    const __m512i target1 = mulhi(x1, total_low, total_high);
    const std::size_t left = count - at;
    _mm512_mask_storeu_epi64(targets + at, first_lanes(left), _mm512_permutex2var_epi64(target0, low_half, target1));
    if (left > kLanes)
      _mm512_mask_storeu_epi64(targets + at + kLanes, first_lanes(left - kLanes),
                               _mm512_permutex2var_epi64(target0, high_half, target1));
  }
}

PEARL_AVX512 inline __m512i prefix_sums(__m512i sums) {
  const __m512i zero = _mm512_setzero_si512();
  sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 7));
  sums = _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 6));
  return _mm512_add_epi64(sums, _mm512_alignr_epi64(sums, zero, 4));
}

PEARL_AVX512 inline __m512i prefix_sums_of_leaves(const std::uint32_t* leaves) {
  const __m512i zero = _mm512_setzero_si512();
  __m512i sums = _mm512_loadu_si512(leaves);
  sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 15));
  sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 14));
  sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 12));
  return _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 8));
}

// Not by _mm512_reduce_add, whose last addition is one of signed scalars.
PEARL_AVX512 inline std::uint64_t sum_of_sixteen(const std::uint64_t* siblings) {
  const __m512i eight = _mm512_add_epi64(_mm512_loadu_si512(siblings), _mm512_loadu_si512(siblings + 8));
  const __m256i four = _mm256_add_epi64(_mm512_castsi512_si256(eight), _mm512_extracti64x4_epi64(eight, 1));
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))));
}

PEARL_AVX512 inline std::uint32_t sum_of_sixteen(const std::uint32_t* siblings) {
  const __m512i sixteen = _mm512_loadu_si512(siblings);
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(sixteen), _mm512_extracti64x4_epi64(sixteen, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1))));
}

template <unsigned K>
PEARL_AVX512 inline unsigned pick_node(const std::uint64_t* siblings, std::uint64_t& target) {
  if constexpr (K == 2) {
    return pick_among<2>(siblings, target);
  } else if constexpr (K == 4) {
    alignas(32) std::uint64_t before[8];
    const __m256i zero = _mm256_setzero_si256();
    __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(siblings));
    sums = _mm256_add_epi64(sums, _mm256_alignr_epi64(sums, zero, 3));
    sums = _mm256_add_epi64(sums, _mm256_alignr_epi64(sums, zero, 2));
    const auto passed =
        _mm256_cmple_epu64_mask(sums, _mm256_set1_epi64x(static_cast<std::int64_t>(target)));
    before[3] = 0;
    _mm256_store_si256(reinterpret_cast<__m256i*>(before + 4), sums);
    const auto pick = static_cast<unsigned>(_mm_popcnt_u32(passed));
    target -= before[3 + pick];
    return pick;
  } else if constexpr (K == 8) {
    alignas(64) std::uint64_t before[16];
    const __m512i sums = prefix_sums(_mm512_loadu_si512(siblings));
    const auto passed = _mm512_cmple_epu64_mask(sums, constant(static_cast<std::int64_t>(target)));
    before[7] = 0;
    _mm512_store_si512(before + 8, sums);
    const auto pick = static_cast<unsigned>(_mm_popcnt_u32(passed));
    target -= before[7 + pick];
    return pick;
  } else if constexpr (K == 16) {
    alignas(64) std::uint64_t before[24];
    const __m512i low = prefix_sums(_mm512_loadu_si512(siblings));
    const __m512i high = _mm512_add_epi64(prefix_sums(_mm512_loadu_si512(siblings + 8)),
                                          _mm512_permutexvar_epi64(constant(7), low));
    const __m512i wanted = constant(static_cast<std::int64_t>(target));
    const unsigned passed = _mm512_cmple_epu64_mask(low, wanted) | _mm512_cmple_epu64_mask(high, wanted) << 8;
    before[7] = 0;
    _mm512_store_si512(before + 8, low);
    _mm512_store_si512(before + 16, high);
    const auto pick = static_cast<unsigned>(_mm_popcnt_u32(passed));
    target -= before[7 + pick];
    return pick;
  } else if constexpr (K >= 128) {
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

// Sixteen leaves of 28 bits sum to less than 2^32.
template <unsigned K>
PEARL_AVX512 inline unsigned pick_leaf(const std::uint32_t* siblings, std::uint64_t& target) {
  if constexpr (K <= 4) {
    return pick_among<K>(siblings, target);
  } else if constexpr (K == 8) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(siblings));
    sums = _mm256_add_epi32(sums, _mm256_alignr_epi32(sums, zero, 7));
    sums = _mm256_add_epi32(sums, _mm256_alignr_epi32(sums, zero, 6));
    sums = _mm256_add_epi32(sums, _mm256_alignr_epi32(sums, zero, 4));
    return static_cast<unsigned>(
        _mm_popcnt_u32(_mm256_cmple_epu32_mask(sums, _mm256_set1_epi32(static_cast<int>(target)))));
  } else if constexpr (K == 16) {
    return static_cast<unsigned>(_mm_popcnt_u32(
        _mm512_cmple_epu32_mask(prefix_sums_of_leaves(siblings), _mm512_set1_epi32(static_cast<int>(target)))));
  } else {
    std::uint32_t sixteens[K / 16];
    for (unsigned i = 0; i < K / 16; ++i) sixteens[i] = sum_of_sixteen(siblings + 16 * i);
    const unsigned first = 16 * pick_among<K / 16>(sixteens, target);
    return first + pick_leaf<16>(siblings + first, target);
  }
}

PEARL_AVX512 PriorityScan scan(const float* priorities, std::size_t count) { return scan_of(priorities, count); }

PEARL_AVX512 bool all_below(const std::int64_t* indices, std::size_t count, std::size_t end) {
  return all_below_of(indices, count, end);
}

template <unsigned K>
PEARL_AVX512 void find(const TreeLevels& tree, std::size_t level, std::uint64_t* rest, std::size_t count, std::int64_t* places,
                       std::uint32_t* values) {
  PEARL_DESCEND(K, pick_node, pick_leaf)
}

constexpr ReplayKernels kKernels = {
    "avx512",
    quantise_all,
    smallest,
    weights_of,
    targets_of,
    scan,
    all_below,
    {nullptr, find<2>, find<4>, find<8>, find<16>, find<32>, find<64>, find<128>, find<256>}};

}  // namespace

const ReplayKernels* avx512_replay_kernels() {
  __builtin_cpu_init();
  const bool present = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  return present ? &kKernels : nullptr;
}

}  // namespace pearl

#else

namespace pearl {
const ReplayKernels* avx512_replay_kernels() { return nullptr; }
}  // namespace pearl

#endif
