// The learner's loops in the compiler's own vectors of four floats: SSE2 on x86-64, NEON on arm64.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "pearl/learner/kernels.hpp"

#define PEARL_SIMD
#define PEARL_OP inline __attribute__((always_inline))

namespace pearl::learner {
namespace {

constexpr std::size_t kLanes = 4;
constexpr int kRows = 6;  // 12 sums, two vectors of b, one of a: 15 of 16 registers

using F = float __attribute__((vector_size(16)));
using I = std::int32_t __attribute__((vector_size(16)));

PEARL_OP F zero() { return F{}; }
PEARL_OP F spread(float x) { return F{x, x, x, x}; }
PEARL_OP F spread(const float* x) { return spread(*x); }
PEARL_OP F load(const float* x) {
  F value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}
PEARL_OP F load_first(const float* x, std::size_t count) {
  F value{};
  std::memcpy(&value, x, count * sizeof(float));
  return value;
}
PEARL_OP F load_bytes(const std::uint8_t* x) {
  return F{static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]), static_cast<float>(x[3])};
}
PEARL_OP void store(float* x, F value) { std::memcpy(x, &value, sizeof(value)); }
PEARL_OP void store_first(float* x, F value, std::size_t count) { std::memcpy(x, &value, count * sizeof(float)); }
PEARL_OP F multiply_add(F a, F b, F c) { return a * b + c; }
PEARL_OP F square_root(F a) { return F{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
PEARL_OP F select(I mask, F then, F otherwise) {
  return std::bit_cast<F>((mask & std::bit_cast<I>(then)) | (~mask & std::bit_cast<I>(otherwise)));
}
PEARL_OP F fast_root(F a) { return square_root(a); }
PEARL_OP F minus_fast_quotient(F from, F a, F b) { return from - a / b; }
PEARL_OP F min(F a, F b) { return select(a < b, a, b); }
// NaN if a is NaN.
PEARL_OP F max(F a, F b) { return select(b > a, b, a); }
PEARL_OP F absolute(F a) { return std::bit_cast<F>(std::bit_cast<I>(a) & 0x7FFFFFFF); }
// For magnitudes below 2^22: the sum's last bit has the value 1.
PEARL_OP F round(F a) { return (a + spread(0x1.8p23f)) - spread(0x1.8p23f); }
PEARL_OP F times_power_of_two(F a, F whole) {
  return a * std::bit_cast<F>((__builtin_convertvector(whole, I) + 127) << 23);
}
PEARL_OP F with_sign_of(F size, F sign) {
  return std::bit_cast<F>(std::bit_cast<I>(size) | (std::bit_cast<I>(sign) & std::bit_cast<I>(spread(-0.0f))));
}
PEARL_OP F where_above(F a, F bound, F then, F otherwise) { return select(a > bound, then, otherwise); }
PEARL_OP F where_positive(F gate, F value) { return select(gate > zero(), value, zero()); }
PEARL_OP float total(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
PEARL_OP F totals(const F* rows) {
  float sums[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) sums[i] = total(rows[i]);
  return load(sums);
}

void transpose_block(const float* source, std::size_t source_row, float* destination, std::size_t destination_row) {
  for (std::size_t i = 0; i < kLanes; ++i)
    for (std::size_t j = 0; j < kLanes; ++j) destination[j * destination_row + i] = source[i * source_row + j];
}

#include "kernels_body.hpp"

}  // namespace

const LearnerKernels& plain_learner_kernels() {
  static constexpr LearnerKernels kernels = table_of("plain");
  return kernels;
}

}  // namespace pearl::learner
