// Blocks of 16 x 32 and 32 x 16 numbers as products in AMX take them: how they are split into bfloat16 parts and
// multiplied, and how sums are finished. kernels_amx.cpp says why the products of parts are as exact as float32.
#pragma once

#include "amx.hpp"

#if defined(PEARL_AMX)

#include <algorithm>

#include "pearl/learner/kernels.hpp"

namespace pearl::learner::amx {

constexpr std::size_t kBlock = kParts * kTileNumbers;  // the parts of 16 rows or columns and 32 steps
// At a time. The tiles' unit falls behind if more than about 64 vector operations come between four of its products.
constexpr std::size_t kSplitRows = 2, kFinishRows = 4;

// Tells the compiler that a tile's load reads memory.
PEARL_AMX_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

PEARL_AMX_INLINE __mmask16 positive(__m512 x, __mmask16 of = 0xFFFF) {
  return _mm512_mask_cmp_ps_mask(of, x, _mm512_setzero_ps(), _CMP_GT_OQ);
}

// Pairs of bfloat16 numbers, each 1 or 0.
PEARL_AMX_INLINE __m512i ones(__mmask16 even, __mmask16 odd) {
  const __m512i lower = _mm512_maskz_mov_epi32(even, _mm512_set1_epi32(0x3F80));
  return _mm512_mask_or_epi32(lower, odd, lower, _mm512_set1_epi32(0x3F800000));
}

// Adds the product of two tiles to a third: the intrinsic takes no numbers of a template.
template <int To, int Left, int Right>
PEARL_AMX_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(Left), "i"(Right));
}

// The unit that multiplies tiles sleeps after about 300 ns without a product, and takes 275 ns to wake up (measured).
// So kernels give it a product from time to time, into tile 0, whose sums are unused at that time.
PEARL_AMX_INLINE void keep_awake() { multiply_tiles<0, 4, 6>(); }

// Tiles 0 to 3, which sums are in.
PEARL_AMX_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
// Each to where `place` says.
template <class Place>
PEARL_AMX_INLINE void store_sums(const Place& place) {
  _tile_stored(0, place(0), 64);
  _tile_stored(1, place(1), 64);
  _tile_stored(2, place(2), 64);
  _tile_stored(3, place(3), 64);
}

inline __mmask16 first_lanes(std::size_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xFFFFu : (1u << count) - 1);
}

// The numbers that are split: the source's own; ones where those are positive, and else zeros; or the source's own
// times a factor of their step, where the steps are lanes (a's blocks) or rows (b's).
enum class Taken { themselves, gates, times_lanes, times_rows };

// A block of a factor, 16 rows of a or 16 columns of b with 32 steps, that is split row by row into pairs of steps i
// and i + 16. Numbers that the factor lacks are zeros.
struct Split {
  const float *even, *odd;
  std::ptrdiff_t row;
  __mmask16 even_lanes, odd_lanes;
  std::size_t even_rows, odd_rows;  // others are zeros
  std::uint16_t* to;
  const float* times = nullptr;  // a number for each of the 32 steps, if they are multiplied by it

  // Rows from `first` on.
  template <std::size_t Parts, Taken As = Taken::themselves>
  PEARL_AMX_INLINE void do_rows(std::size_t first) const {
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(first) * row;
    if ((even_lanes & odd_lanes) == 0xFFFF && std::min(even_rows, odd_rows) >= first + kSplitRows) {
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kSplitRows; ++i) {
        const std::ptrdiff_t from = at + static_cast<std::ptrdiff_t>(i) * row;
        take<Parts, As>(_mm512_loadu_ps(even + from), _mm512_loadu_ps(odd + from), true, true, first + i);
      }
      return;
    }
    for (std::size_t i = 0; i < kSplitRows; ++i) {
      const std::ptrdiff_t from = at + static_cast<std::ptrdiff_t>(i) * row;
      const bool has_even = first + i < even_rows, has_odd = first + i < odd_rows;
      take<Parts, As>(_mm512_maskz_loadu_ps(has_even ? even_lanes : 0, even + from),
                      _mm512_maskz_loadu_ps(has_odd ? odd_lanes : 0, odd + from), has_even, has_odd, first + i);
    }
  }

 private:
  template <std::size_t Parts, Taken As>
  PEARL_AMX_INLINE void take(__m512 even_numbers, __m512 odd_numbers, bool has_even, bool has_odd,
                             std::size_t i) const {
    std::uint16_t* const target = to + i * kDepth;
    if constexpr (As == Taken::gates)
      return _mm512_store_si512(target, ones(positive(even_numbers), positive(odd_numbers)));
    if constexpr (As == Taken::times_lanes) {
      even_numbers = _mm512_mul_ps(even_numbers, _mm512_loadu_ps(times));
      odd_numbers = _mm512_mul_ps(odd_numbers, _mm512_loadu_ps(times + kLanes));
    }
    if constexpr (As == Taken::times_rows) {
      even_numbers = _mm512_mul_ps(even_numbers, _mm512_set1_ps(has_even ? times[i] : 0.0f));
      odd_numbers = _mm512_mul_ps(odd_numbers, _mm512_set1_ps(has_odd ? times[i + kLanes] : 0.0f));
    }
    split<Parts>(even_numbers, odd_numbers, target);
  }
};

// How the sums of 16 x 16 are finished: `rows` of them, and some columns, belong to c.
struct Finish {
  const float* sums;
  std::size_t rows;
  __mmask16 lanes;
  float* c;
  const float *bias, *gate;
  const float *row_times = nullptr, *column_times = nullptr;  // if it `Scales`, one of these multiplies the sums

  // Rows from `first` on.
  template <bool Scales = false>
  PEARL_AMX_INLINE void do_rows(const Gemm& g, bool accumulate, bool relu, std::size_t first) const {
    __m512 value[kFinishRows];
    const std::size_t count = std::min(kFinishRows, rows - first);
    const auto each = [&](const auto& visit) PEARL_AMX_SIMD __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kFinishRows; ++i)
        if (i < count) visit(value[i], first + i, static_cast<std::ptrdiff_t>(first + i) * g.c_row);
    };
    const __m512 none = _mm512_setzero_ps();
    each([&](__m512& sum, std::size_t i, std::ptrdiff_t) PEARL_AMX_SIMD __attribute__((always_inline)) {
      sum = _mm512_load_ps(sums + i * kLanes);
      if constexpr (Scales)
        sum = _mm512_mul_ps(
            sum, row_times != nullptr ? _mm512_set1_ps(row_times[i]) : _mm512_maskz_loadu_ps(lanes, column_times));
    });
    if (bias != nullptr)
      each([&](__m512& sum, std::size_t i, std::ptrdiff_t) PEARL_AMX_SIMD __attribute__((always_inline)) {
        sum = _mm512_add_ps(sum, g.bias_of_columns ? _mm512_maskz_loadu_ps(lanes, bias) : _mm512_set1_ps(bias[i]));
      });
    if (accumulate)
      each([&](__m512& sum, std::size_t, std::ptrdiff_t at) PEARL_AMX_SIMD __attribute__((always_inline)) {
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, c + at));
      });
    if (relu)
      each([&](__m512& sum, std::size_t, std::ptrdiff_t) PEARL_AMX_SIMD __attribute__((always_inline)) {
        sum = _mm512_max_ps(none, sum);  // a NaN stays a NaN
      });
    if (gate != nullptr)
      each([&](__m512& sum, std::size_t, std::ptrdiff_t at) PEARL_AMX_SIMD __attribute__((always_inline)) {
        const __m512 gates = _mm512_maskz_loadu_ps(lanes, gate + at);
        sum = _mm512_maskz_mov_ps(positive(gates), sum);
      });
    each([&](__m512& sum, std::size_t, std::ptrdiff_t at) PEARL_AMX_SIMD __attribute__((always_inline)) {
      _mm512_mask_storeu_ps(c + at, lanes, sum);
    });
  }
};

// The products of 16 x 32 by 32 x 16 numbers, or of two by two such blocks: six of their three parts, three of two; of
// numbers on one side that are whole in one part, as many as the other side has. After each, `meanwhile` gives the vector
// units something to do.
template <std::size_t Left, std::size_t Right, int Rows, int Columns, class Meanwhile>
PEARL_AMX_INLINE void multiply(const std::uint16_t* const* left, const std::uint16_t* const* right,
                               const Meanwhile& meanwhile) {
  const auto all = [&] PEARL_AMX_SIMD __attribute__((always_inline)) {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Columns == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Rows == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Rows == 2 && Columns == 2) _tile_dpbf16ps(3, 5, 7);
    meanwhile();
  };
  const auto load_left = [&](std::size_t part) PEARL_AMX_SIMD __attribute__((always_inline)) {
    _tile_loadd(4, left[0] + part * kTileNumbers, 64);
    if constexpr (Rows == 2) _tile_loadd(5, left[1] + part * kTileNumbers, 64);
  };
  const auto load_right = [&](std::size_t part) PEARL_AMX_SIMD __attribute__((always_inline)) {
    _tile_loadd(6, right[0] + part * kTileNumbers, 64);
    if constexpr (Columns == 2) _tile_loadd(7, right[1] + part * kTileNumbers, 64);
  };
  // Small products first; each part on the right, which comes from the L2 cache, is loaded once.
  static_assert(Left == 1 || Right == 1 || Left == Right);
  if constexpr (Right == 1) {
    load_right(0);
    for (std::size_t part = Left; part-- > 0;) {
      load_left(part);
      all();
    }
    return;
  }
  load_left(0);
  if constexpr (Right == 3) {
    load_right(2);
    all();
  }
  load_right(1);
  all();
  if constexpr (Left > 1) load_left(1);
  if constexpr (Left == 3) all();
  load_right(0);
  all();
  if constexpr (Left == 1) return;
  if constexpr (Left == 3) {
    load_left(2);
    all();
  }
  load_left(0);
  all();
}

// A chain whose second product is 64 x 64 by panels. Returns false, and does nothing, for other chains.
template <std::size_t Parts>
bool multiply_chain(const Chain& chain);

constexpr std::size_t kSquare = 64;  // the width of layers in chains and of layer_gradient
constexpr std::size_t kRemade = 6;   // most inputs of the layer before of which layer_gradient makes x again
constexpr std::size_t kPanel = 32;   // columns of a panel

// Rows of weights that are `row` floats apart, of numbers that are `column` floats apart.
inline void copy_weights(const float* a, std::ptrdiff_t row, std::ptrdiff_t column, std::size_t rows,
                         float (*to)[kSquare]) {
  for (std::size_t i = 0; i < rows; ++i, a += row)
    if (column == 1)
      std::copy_n(a, kSquare, to[i]);
    else
      for (std::size_t j = 0; j < kSquare; ++j) to[i][j] = a[static_cast<std::ptrdiff_t>(j) * column];
}

template <std::size_t Parts>
void square_gradient(const LayerGradient& gradient);

// The signs of a layer's results, half a panel's 2 * 64 numbers behind the one before; its weights; and, for each output,
// where the product of its weights and of the sums of x times slopes goes, before those are multiplied by the weight of
// the single output behind.
struct SignedLayer {
  const std::uint16_t* signs;
  const float* weights;
  float* products;
};
// Behind a single output, with signs in the place of gates. The bias has no gradient here.
template <std::size_t Parts>
void gradient_of_signs(const LayerGradient& gradient, const SignedLayer& layer);

template <std::size_t Parts>
void single_output(const SingleOutput& single);

// One thread's memory for split factors: grows to what the largest product needs.
std::uint16_t* memory(std::size_t numbers);

// The same as a T that begins with a page.
template <class T>
T& pages() {
  constexpr std::size_t kBytes = 4096;
  const auto address = reinterpret_cast<std::uintptr_t>(memory((sizeof(T) + kBytes) / sizeof(std::uint16_t)));
  return *reinterpret_cast<T*>((address + kBytes - 1) / kBytes * kBytes);
}

}  // namespace pearl::learner::amx

#endif
