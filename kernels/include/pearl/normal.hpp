// Standard normal numbers that depend only on their index, not on earlier draws: the Box-Muller transform (1958) of
// Philox words. Only IEEE operations in a fixed order and no libm, so that every machine draws the same bits; no branches,
// so that compilers can vectorise.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "pearl/device/portable.hpp"

namespace pearl {

// -2 log(u) for u = (word / 2 + 0.5) / 2^31, which lies in (0, 1]: never infinite, never below 0.
PEARL_FN float minus_two_log_uniform(std::uint32_t word) {
  constexpr float kLog2 = 0.6931471805599453f;
  constexpr std::int32_t kRootHalf = 0x3F3504F3;  // the bits of sqrt(0.5)
  const float scaled = static_cast<float>(static_cast<std::int32_t>(word >> 1)) + 0.5f;  // u * 2^31
  // scaled = 2^exponent * mantissa, the mantissa in [sqrt(0.5), sqrt(2)).
  const std::int32_t above = std::bit_cast<std::int32_t>(scaled) - kRootHalf;
  const auto exponent = static_cast<float>((above >> 23) - 31);
  const float mantissa = std::bit_cast<float>((above & 0x007FFFFF) + kRootHalf);
  // log(m) = 2 artanh((m - 1) / (m + 1)), whose argument is at most 0.172.
  const float x = (mantissa - 1.0f) / (mantissa + 1.0f), square = x * x;
  const float series =
      1.0f + square * (1.0f / 3.0f + square * (1.0f / 5.0f + square * (1.0f / 7.0f + square * (1.0f / 9.0f))));
  return -2.0f * (exponent * kLog2 + 2.0f * x * series);
}

struct NormalPair {
  float first, second;
};

// Two independent numbers: the first word gives the distance from 0, the second the direction.
PEARL_FN NormalPair normal_pair(std::uint32_t distance, std::uint32_t direction) {
  constexpr float kQuarterTurn = 1.5707963267948966f;
#ifdef __CUDA_ARCH__
  const float radius = sqrtf(minus_two_log_uniform(distance));
#elif defined(__SYCL_DEVICE_ONLY__)
  const float radius = sycl::sqrt(minus_two_log_uniform(distance));
#else
  const float radius = std::sqrt(minus_two_log_uniform(distance));
#endif
  // A direction is a quarter of the circle (two bits), plus a turn by at most half a quarter either way.
  const std::uint32_t quarter = direction >> 30;
  const float turn = static_cast<float>(static_cast<std::int32_t>(direction << 2)) * 0x1p-32f;
  const float angle = turn * kQuarterTurn, square = angle * angle;
  const float sine =
      angle * (1.0f + square * (-1.0f / 6.0f + square * (1.0f / 120.0f + square * (-1.0f / 5040.0f +
                                                                                 square * (1.0f / 362880.0f)))));
  const float cosine =
      1.0f + square * (-0.5f + square * (1.0f / 24.0f + square * (-1.0f / 720.0f + square * (1.0f / 40320.0f))));
  // Quarter by quarter, (cos, sin) is (c, s), (-s, c), (-c, -s), (s, -c).
  const bool swapped = (quarter & 1u) != 0;
  const std::uint32_t first_sign = ((quarter + 1u) & 2u) << 30, second_sign = (quarter & 2u) << 30;
  const float first = swapped ? sine : cosine, second = swapped ? cosine : sine;
  return {radius * std::bit_cast<float>(std::bit_cast<std::uint32_t>(first) ^ first_sign),
          radius * std::bit_cast<float>(std::bit_cast<std::uint32_t>(second) ^ second_sign)};
}

// Numbers 0..count-1 (at most 2^34) of draw `draw` of step `step`. Numbers 4 * b to 4 * b + 3 come from Philox counter
// (b, draw, step): the first two from its words 0 and 1, the others from words 2 and 3.
void fill_normal(std::uint64_t seed, std::uint64_t step, std::uint32_t draw, std::size_t count, float* out);

}  // namespace pearl
