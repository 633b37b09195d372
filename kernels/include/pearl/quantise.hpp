// Priorities to integers: q = clip(round(p^alpha * 2^scale), 1, 2^28 - 1). Only integer add, multiply and shift, so that
// every device (and NumPy: pearl/replay/reference.py) gives the same bits.
//
// Accuracy: log2 is within 5e-9 (absolute) and cut to 2^-24, 2^x is within 7e-9 (relative), alpha and beta are rounded
// to 2^-28. So before rounding to an integer, p^alpha is within 4e-7 (relative) for every positive float32 and
// alpha <= 4, and within 2e-7 for 2^-18 < p < 2^18.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "pearl/device/portable.hpp"

namespace pearl {

inline constexpr std::uint32_t kLeafMax = (1u << 28) - 1;  // 28 significant bits
inline constexpr std::uint32_t kInfinityBits = 0x7F800000;  // of a float's bits
inline constexpr int kDefaultScale = 20;                   // range 256, resolution 1e-6
inline constexpr double kExponentMax = 4.0;                // of alpha and beta
inline constexpr int kHysteresisBits = 2;                  // bits that all leaves can still grow by if none is large()

// log2(1 + f) / f on [0, 1) at Chebyshev nodes, lowest power first, Q35.
PEARL_TABLE std::int64_t kLog2Coefficients[10] = {49570623885, -24785258860, 16521745522, -12368671917,
                                                       9747207777,  -7569269272,  5226540119,  -2794475170,
                                                       968735272,   -157439128};
// (2^x - 1) / x on [0, 1) at Chebyshev nodes, lowest power first, Q31.
PEARL_TABLE std::uint64_t kExp2Coefficients[6] = {1488522215, 515883993, 119176803, 20727931, 2725622, 447061};

// log2 of (1 + fraction / 2^27) * 2^exponent, Q32.
PEARL_FN std::int64_t log2_q32(std::int64_t fraction, int exponent) {
  std::int64_t acc = kLog2Coefficients[9];
  for (int i = 8; i >= 0; --i) acc = kLog2Coefficients[i] + ((acc * fraction) >> 27);
  return (static_cast<std::int64_t>(exponent) * (std::int64_t{1} << 32)) + (((acc * fraction) >> 27) >> 3);
}

// log2 of a positive finite float, Q32; subnormals included.
PEARL_FN std::int64_t log2_q32(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  std::uint32_t mantissa = bits & 0x7FFFFFu;
  int exponent = static_cast<int>(bits >> 23) - 127;
  if (exponent == -127) {
    const int shift = std::countl_zero(mantissa) - 8;
    mantissa = (mantissa << shift) & 0x7FFFFFu;
    exponent = -126 - shift;
  }
  return log2_q32(static_cast<std::int64_t>(mantissa) << 4, exponent);
}

// log2 of a leaf in [1, 2^28), Q32.
PEARL_FN std::int64_t log2_q32(std::uint32_t leaf) {
  const int exponent = 31 - std::countl_zero(leaf);
  return log2_q32((static_cast<std::int64_t>(leaf) << (27 - exponent)) & ((std::int64_t{1} << 27) - 1), exponent);
}

// 2^(fraction / 2^32), Q31: in [2^31, 2^32).
PEARL_FN std::uint64_t exp2_q31(std::uint64_t fraction) {
  std::uint64_t acc = kExp2Coefficients[5];
  for (int i = 4; i >= 0; --i) acc = kExp2Coefficients[i] + ((acc * fraction) >> 32);
  return (std::uint64_t{1} << 31) + ((acc * fraction) >> 32);
}

// alpha or beta as Q28.
inline std::int64_t exponent_q28(double exponent) {
  return static_cast<std::int64_t>(std::floor(exponent * 268435456.0 + 0.5));
}

// log2(p^alpha) from log2(p), both Q32.
PEARL_FN std::int64_t power_q32(std::int64_t log2, std::int64_t exponent_q28) {
  return ((log2 >> 8) * exponent_q28) >> 20;
}

// round(2^y * 2^scale), half up, y Q32; returns 2^28 for anything beyond 28 bits.
PEARL_FN std::uint32_t round_scaled(std::int64_t y, int scale) {
  const std::int64_t shift = 31 - (y >> 32) - scale;
  if (shift <= 2) return kLeafMax + 1;
  if (shift > 33) return 0;
  const std::uint64_t value = exp2_q31(static_cast<std::uint64_t>(y) & 0xFFFFFFFFu);
  const std::uint64_t rounded = (value + (std::uint64_t{1} << (shift - 1))) >> shift;
  return static_cast<std::uint32_t>(rounded > kLeafMax ? kLeafMax + 1 : rounded);
}

// The leaf for a priority that is neither NaN nor negative.
PEARL_FN std::uint32_t quantise(float priority, std::int64_t alpha_q28, int scale) {
  // Compared as bits: the same result in a thread that flushes subnormals to zero.
  const auto bits = std::bit_cast<std::int32_t>(priority);
  if (bits <= 0) return 0;
  if (bits >= 0x7F800000) return kLeafMax;
  const std::uint32_t leaf = round_scaled(power_q32(log2_q32(priority), alpha_q28), scale);
  return leaf < 1 ? 1 : (leaf > kLeafMax ? kLeafMax : leaf);
}

// The smallest s >= 0 for which a finite positive priority fits at scale - s.
PEARL_FN int excess_bits(float priority, std::int64_t alpha_q28, int scale) {
  const std::int64_t y = power_q32(log2_q32(priority), alpha_q28);
  const std::int64_t above = (y >> 32) + scale - 27;
  int excess = above > 0 ? static_cast<int>(above) : 0;
  if (round_scaled(y, scale - excess) > kLeafMax) ++excess;
  return excess;
}

// Zero for a leaf that would fit a scale kHysteresisBits higher, and for kLeafMax (infinite priorities, at any scale).
// A sum of these is zero only if all are.
PEARL_FN std::uint32_t large(std::uint32_t leaf) {
  return (leaf + 1) >> (28 - kHysteresisBits) & ((1u << kHysteresisBits) - 1);
}

inline std::uint64_t sum_of_large(const std::uint32_t* leaves, std::size_t count) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += large(leaves[i]);
  return sum;
}

// A priority with epsilon added. With epsilon 0 it keeps its bits, where an addition may flush subnormals to zero.
PEARL_FN float raised(float priority, float epsilon) { return epsilon == 0.0f ? priority : priority + epsilon; }

// The highest scale, up to the default, that fits a finite priority (0: none).
PEARL_FN int highest_scale(float priority, std::int64_t alpha_q28) {
  return kDefaultScale - (priority > 0.0f ? excess_bits(priority, alpha_q28, kDefaultScale) : 0);
}

// The first of `fanout` siblings whose inclusive prefix sum exceeds the target; lowers the target by the sum before it.
template <class Node>
PEARL_FN std::uint32_t pick(const Node* siblings, std::uint32_t fanout, std::uint64_t& target) {
  std::uint64_t sum = 0, before = 0;
  std::uint32_t passed = 0;
  for (std::uint32_t k = 0; k + 1 < fanout; ++k) {
    sum += static_cast<std::uint64_t>(siblings[k]);
    const bool beyond = sum <= target;
    before = beyond ? sum : before;
    passed += beyond;
  }
  target -= before;
  return passed;
}

// (leaf_min / leaf)^beta from the two logarithms; in (0, 1].
PEARL_FN float importance_weight(std::int64_t log2_min, std::int64_t log2_leaf, std::int64_t beta_q28) {
  const std::int64_t y = power_q32(log2_min - log2_leaf, beta_q28);
  const float value = static_cast<float>(exp2_q31(static_cast<std::uint64_t>(y) & 0xFFFFFFFFu)) * 0x1p-31f;
  return value * std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<int>(y >> 32) + 127) << 23);
}

}  // namespace pearl
