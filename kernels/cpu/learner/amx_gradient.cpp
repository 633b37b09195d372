// The gradient of a layer's weights in AMX, for layers of 64 inputs and outputs.
//
// The slopes and inputs of a panel of 32 transitions are split into 24 KiB, which stay in the L1 cache. Two by two
// blocks of sums take turns, so that after each turn a pair of blocks is free for the next panel. The sums are read
// from memory for each panel, which takes less time than reading split factors of all panels again.
//
// Behind a single output, as of critics and values, the slope of output o and transition c is gate(o, c) * weight(o) *
// factor(c). Then the gates are multiplied instead of slopes. They are ones and zeros, exact in one part: three
// products of parts replace six, and only the inputs are split. Inputs are multiplied by their transition's factor
// before the split, and the sums by the output's weight at the end.
#include "amx_blocks.hpp"
#include "avx512_turn.hpp"

#if defined(PEARL_AMX)

namespace pearl::learner::amx {
namespace {

constexpr std::size_t kBlocks = kSquare / kLanes, kUnit = 4;
constexpr std::size_t kUnits = 2 * kLanes / kUnit;  // of a pair of blocks
constexpr std::size_t kFew = 4;  // transitions of a last panel whose products of parts are steps of one product

// The high, middle and low parts of numbers, each in upper halves.
struct Thirds {
  __m512i high, middle, low;
};
PEARL_AMX_INLINE Thirds thirds_of(__m512 x) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)), half = _mm512_set1_epi32(0x8000);
  const __m512i high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper);
  const __m512 left = _mm512_sub_ps(x, _mm512_castsi512_ps(high));
  const __m512i middle = _mm512_and_si512(_mm512_castps_si512(left), upper);
  return {high, middle, _mm512_castps_si512(_mm512_sub_ps(left, _mm512_castsi512_ps(middle)))};
}
// All products of parts as steps of one product. Pairs of parts of a left factor meet those of a right one: (high, high)
// and (middle, middle) meet (high, middle), and (high, low) meet (low, high).
struct StepPairs {
  __m512i high, middle, low;
};
PEARL_AMX_INLINE StepPairs left_pairs(const Thirds& x) {
  return {pair_of(x.high, x.high), pair_of(x.middle, x.middle), pair_of(x.high, x.low)};
}
PEARL_AMX_INLINE StepPairs right_pairs(const Thirds& x) {
  const __m512i both = pair_of(x.high, x.middle);
  return {both, both, pair_of(x.low, x.high)};
}

// A load waits for a recent store if the last 12 bits of their addresses agree; a tile's load then waits long, as
// stores are late while tiles are busy. So each pair of blocks has its own quarter of pages: one is stored while two
// others are loaded.
struct Held {
  using Tile = std::uint16_t[kTileNumbers];
  Tile parts[2 * kParts][4];  // of a pair's blocks; of left pairs 0 and 1, and of right ones
  std::uint32_t few_left[kSquare][kLanes], few_right[kBlocks][kLanes][kLanes];
  float sums[kSquare][kSquare];  // of gates' products, if their results are added to weights

  std::uint16_t* left(std::size_t block) { return parts[block % 2 * kParts][block / 2]; }
  std::uint16_t* right(std::size_t block) { return parts[block % 2 * kParts][2 + block / 2]; }
};
constexpr std::size_t kApart = 4 * kTileNumbers;  // from part to part of a block

// Slopes: in memory, made here, or made of gates and factors, where gates are positive numbers or a bit each.
enum class Slopes { stored, made, of_gates, of_signs };

// `MakesX`: the inputs are not in memory.
template <std::size_t Parts, Slopes From, bool MakesX>
class Gradient {
 public:
  explicit Gradient(const LayerGradient& gradient, const SignedLayer& layer = {})
      : g_(gradient),
        layer_(layer),
        held_(pages<Held>()),
        products_(kOfGates && gradient.accumulate ? held_.sums[0] : gradient.weights) {}

  PEARL_AMX_SIMD void run() {
    if constexpr (From != Slopes::stored)
      for (float* sums : sums_) _mm512_store_ps(sums, _mm512_setzero_ps());
    if constexpr (MakesX) copy_weights(g_.made_x.a, 1, g_.made_x.a_row, g_.made_x.depth, weights_of_x_);
    const bool few = g_.last <= kFew;
    set_up_tiles(kWholeTiles);
    keep_awake();
    if (few) split_few();
    const std::size_t panels = few ? g_.panels - 1 : g_.panels;
    keep_awake();
    for (std::size_t unit = 0; unit < kUnits; ++unit) {
      split_left(0, 0, unit);
      split_right(0, 0, unit);
      if (unit == kUnits / 2) keep_awake();
    }
    load_first(0, 0);
    for (std::size_t panel = 0; panel < panels; ++panel) {
      const std::size_t last = panel % 2 == 0 ? 0 : 2, other = 2 - last, next = panel + 1;
      adds_ = panel > 0 || (g_.accumulate && !kOfGates);
      adds_few_ = few && next == panels;
      Task third{Task::left, next, 0}, fourth{Task::right, next, other};
      if (next == panels) {
        third = {kOfGates ? Task::sums : Task::none, 0, last};
        fourth = {kOfGates ? Task::sums : Task::none, 0, other};
      }
      multiply_pairs(0, last, {Task::right, panel, other}, 0, other);
      multiply_pairs(0, other, {Task::left, panel, 2}, 2, other);
      multiply_pairs(2, other, third, 2, last);
      multiply_pairs(2, last, fourth, 0, other);
    }
    for (std::size_t unit = 0; kOfGates && unit < kUnits; ++unit) {
      finish_sums(2, 0, unit);
      finish_sums(2, 2, unit);
    }
    keep_awake();
    give_up_tiles();
    if constexpr (From == Slopes::of_signs)
      for (std::size_t row = 0; row < kSquare; row += kLanes) _mm512_storeu_ps(layer_.products + row, totals(row));
    else if (From != Slopes::stored && g_.bias != nullptr)
      add_up();
  }

 private:
  static constexpr bool kOfGates = From == Slopes::of_gates || From == Slopes::of_signs;

  // The next work of the vector units: to split a pair of blocks of a panel, of rows of slopes or of x; or to finish
  // sums, two by two blocks, of the pair of rows `at`.
  struct Task {
    enum Of { none, left, right, sums } of;
    std::size_t at, block;
  };

  bool whole(std::size_t panel) const { return panel + 1 < g_.panels || g_.last > kLanes; }

  // Four rows of a pair, which begins with `block`: transitions i and i + 16 are a pair of steps.
  PEARL_AMX_SIMD __attribute__((noinline)) void split_left(std::size_t panel, std::size_t block, std::size_t unit) {
    block += unit / kUnit;
    const std::size_t row = unit % kUnit * kUnit;
    std::uint16_t* const to = held_.left(block) + row * kDepth;
    const __mmask16 all = whole(panel) ? 0xFFFF : 0;
    if constexpr (From == Slopes::of_signs) return take_signs(panel, block * kLanes + row, to);
    if constexpr (From == Slopes::of_gates) return take_gates(panel, block * kLanes + row, all, to);
    __m512 even[kUnit], odd[kUnit];
    if constexpr (From == Slopes::made)
      make_slopes(panel, block * kLanes + row, all, even, odd);
    else
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kUnit; ++i) {
        const float* const from = g_.slopes + ((panel * kBlocks + block) * kLanes + row + i) * kPanel;
        even[i] = _mm512_loadu_ps(from);
        odd[i] = _mm512_maskz_loadu_ps(all, from + kLanes);
      }
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i) split<Parts, true, kApart>(even[i], odd[i], to + i * kDepth);
  }
  // The factors of transitions: a single output's slopes.
  const float* factors(std::size_t panel) const {
    return g_.made_slopes.b + static_cast<std::ptrdiff_t>(panel) * g_.made_slopes.b_panel;
  }
  const float* gates(std::size_t panel, std::size_t row) const {
    return g_.made_slopes.gate + static_cast<std::ptrdiff_t>(panel) * g_.made_slopes.c_panel +
           static_cast<std::ptrdiff_t>(row * kPanel);
  }
  // Ones and zeros, and what the rows of the bias's gradient are: sums of factors.
  PEARL_AMX_INLINE void take_gates(std::size_t panel, std::size_t row, __mmask16 all, std::uint16_t* to) {
    const float* gate = gates(panel, row);
    const __m512 first = _mm512_loadu_ps(factors(panel)), second = _mm512_loadu_ps(factors(panel) + kLanes);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i, gate += kPanel, to += kDepth) {
      const __mmask16 even = positive(_mm512_loadu_ps(gate)), odd = positive(_mm512_loadu_ps(gate + kLanes), all);
      _mm512_store_si512(to, ones(even, odd));
      const __m512 sum = _mm512_load_ps(sums_[row + i]), both = _mm512_mask_add_ps(sum, even, sum, first);
      _mm512_store_ps(sums_[row + i], _mm512_mask_add_ps(both, odd, both, second));
    }
  }
  const std::uint16_t* signs(std::size_t panel, std::size_t row) const {
    return layer_.signs + 2 * panel * kHalf + row;
  }
  // Ones and zeros: the two halves' bits of a row fill both halves of all lanes; each lane looks at its own bits.
  PEARL_AMX_INLINE void take_signs(std::size_t panel, std::size_t row, std::uint16_t* to) const {
    const std::uint16_t* const from = signs(panel, row);
    const auto four = [](const std::uint16_t* bits) PEARL_AMX_SIMD
        __attribute__((always_inline)) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bits)); };
    alignas(16) std::uint32_t of_rows[kUnit];
    _mm_store_si128(reinterpret_cast<__m128i*>(of_rows),
                    _mm_unpacklo_epi16(four(from), whole(panel) ? four(from + kHalf) : _mm_setzero_si128()));
    const __m512i own = _mm512_sllv_epi32(_mm512_set1_epi32(0x10001),
                                          _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i, to += kDepth) {
      const __mmask32 passes = _mm512_test_epi16_mask(_mm512_set1_epi32(static_cast<int>(of_rows[i])), own);
      _mm512_store_si512(to, _mm512_maskz_mov_epi16(passes, _mm512_set1_epi16(0x3F80)));
    }
  }
  PEARL_AMX_INLINE void make_slopes(std::size_t panel, std::size_t row, __mmask16 all, __m512* even, __m512* odd) {
    const Gemm& made = g_.made_slopes;
    const float* const gate = gates(panel, row);
    __mmask16 even_passes[kUnit], odd_passes[kUnit];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i) {
      even_passes[i] = positive(_mm512_loadu_ps(gate + i * kPanel));
      odd_passes[i] = positive(_mm512_loadu_ps(gate + i * kPanel + kLanes), all);
      even[i] = odd[i] = _mm512_setzero_ps();
    }
    const float *b = factors(panel), *a = made.a + row;
    for (std::size_t k = 0; k < made.depth; ++k, b += kPanel, a += made.a_step) {
      const __m512 first = _mm512_loadu_ps(b), second = _mm512_loadu_ps(b + kLanes);
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kUnit; ++i) {
        even[i] = _mm512_maskz_fmadd_ps(even_passes[i], first, _mm512_set1_ps(a[i]), even[i]);
        odd[i] = _mm512_maskz_fmadd_ps(odd_passes[i], second, _mm512_set1_ps(a[i]), odd[i]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i)
      _mm512_store_ps(sums_[row + i], _mm512_add_ps(_mm512_load_ps(sums_[row + i]), _mm512_add_ps(even[i], odd[i])));
  }
  PEARL_AMX_SIMD __attribute__((noinline)) void split_right(std::size_t panel, std::size_t block,
                                                            std::size_t unit) const {
    block += unit / kUnit;
    const std::size_t row = unit % kUnit * kUnit;
    std::uint16_t* const to = held_.right(block) + row * kDepth;
    __m512 even[kUnit], odd[kUnit];
    load_x(panel, block, row, even);
    if (whole(panel))
      load_x(panel, block, kLanes + row, odd);
    else
      odd[0] = odd[1] = odd[2] = odd[3] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i) split<Parts, false, kApart>(even[i], odd[i], to + i * kDepth);
  }

  // The last panel's few transitions: step pairs 4 * i to 4 * i + 3 are the i-th ones of four transitions.
  PEARL_AMX_SIMD __attribute__((noinline)) void split_few() {
    const std::size_t panel = g_.panels - 1;
    std::uint32_t* const left = held_.few_left[0];
    if constexpr (From == Slopes::of_signs) {
      // The pairs of a one are two ones and a one; those of a zero are zeros.
      const __m512i own = _mm512_setr_epi32(0x10001, 0x20002, 0x40004, 0x80008, 0, 0, 0, 0, 1, 2, 4, 8, 0, 0, 0, 0);
      const std::uint16_t* const bits = signs(panel, 0);
#pragma GCC unroll 4
      for (std::size_t row = 0; row < kSquare; ++row) {
        const __mmask32 passes = _mm512_test_epi16_mask(_mm512_set1_epi16(static_cast<short>(bits[row])), own);
        _mm512_store_si512(left + row * kLanes, _mm512_maskz_mov_epi16(passes, _mm512_set1_epi16(0x3F80)));
      }
    } else {
      // Four rows in a vector.
      for (std::size_t row = 0; row < kSquare; row += kFew) {
        const StepPairs slopes = left_pairs(thirds_of(few_slopes(panel, row)));
        store_quarters(slopes.high, left + row * kLanes);
        store_quarters(slopes.middle, left + row * kLanes + kFew);
        store_quarters(slopes.low, left + row * kLanes + 2 * kFew);
        store_quarters(_mm512_setzero_si512(), left + row * kLanes + 3 * kFew);
      }
    }
    for (std::size_t block = 0; block < kBlocks; ++block) {
      __m512 x[kFew];
      load_x(panel, block, 0, x);
      std::uint32_t (*const to)[kLanes] = held_.few_right[block];
      for (std::size_t i = 0; i < kFew; ++i) {
        const StepPairs pairs = right_pairs(thirds_of(x[i]));
        _mm512_store_si512(to[i], pairs.high);
        _mm512_store_si512(to[kFew + i], pairs.middle);
        _mm512_store_si512(to[2 * kFew + i], pairs.low);
        _mm512_store_si512(to[3 * kFew + i], _mm512_setzero_si512());
      }
    }
  }
  PEARL_AMX_INLINE static void store_quarters(__m512i numbers, void* rows) {
    auto* const to = static_cast<__m128i*>(rows);
    _mm_store_si128(to, _mm512_castsi512_si128(numbers));
    _mm_store_si128(to + kFew, _mm512_extracti32x4_epi32(numbers, 1));
    _mm_store_si128(to + 2 * kFew, _mm512_extracti32x4_epi32(numbers, 2));
    _mm_store_si128(to + 3 * kFew, _mm512_extracti32x4_epi32(numbers, 3));
  }
  PEARL_AMX_INLINE static __m512 four_rows(const float* rows) {
    __m512 found = _mm512_castps128_ps512(_mm_loadu_ps(rows));
    found = _mm512_insertf32x4(found, _mm_loadu_ps(rows + kPanel), 1);
    found = _mm512_insertf32x4(found, _mm_loadu_ps(rows + 2 * kPanel), 2);
    return _mm512_insertf32x4(found, _mm_loadu_ps(rows + 3 * kPanel), 3);
  }
  // Of four rows. Slopes that are made begin the sums of their rows, as do gates, which are ones and zeros here.
  PEARL_AMX_INLINE __m512 few_slopes(std::size_t panel, std::size_t row) {
    if constexpr (From == Slopes::stored) return four_rows(g_.slopes + (panel * kSquare + row) * kPanel);
    const Gemm& made = g_.made_slopes;
    const __mmask16 passes = positive(four_rows(gates(panel, row)));
    const float *b = factors(panel), *a = made.a + row;
    if constexpr (From == Slopes::of_gates) {
      const __m512 passed = _mm512_maskz_mov_ps(passes, _mm512_broadcast_f32x4(_mm_loadu_ps(b)));
      store_quarters(_mm512_castps_si512(passed), sums_[row]);
      return _mm512_maskz_mov_ps(passes, _mm512_set1_ps(1.0f));
    }
    __m512 slopes = _mm512_setzero_ps();
    const __m512i quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    for (std::size_t k = 0; k < made.depth; ++k, b += kPanel, a += made.a_step)
      slopes = _mm512_maskz_fmadd_ps(passes, _mm512_broadcast_f32x4(_mm_loadu_ps(b)),
                                     _mm512_permutexvar_ps(quarters, _mm512_castps128_ps512(_mm_loadu_ps(a))), slopes);
    store_quarters(_mm512_castps_si512(slopes), sums_[row]);
    return slopes;
  }

  // x of four transitions, and of a block of inputs; with gates, times the transition's factor.
  PEARL_AMX_INLINE void load_x(std::size_t panel, std::size_t block, std::size_t transition, __m512* x) const {
    if constexpr (!MakesX) {
      turn_columns(g_.x + (panel * kBlocks + block) * kLanes * kPanel + transition, kPanel, x);
    } else {
      const Gemm& made = g_.made_x;
      const float* b = made.b + static_cast<std::ptrdiff_t>(panel) * made.b_panel + transition;
      x[0] = x[1] = x[2] = x[3] = _mm512_loadu_ps(made.bias + block * kLanes);
      for (std::size_t k = 0; k < made.depth; ++k, b += kPanel) {
        const __m512 weights = _mm512_load_ps(weights_of_x_[k] + block * kLanes);
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kUnit; ++i) x[i] = _mm512_fmadd_ps(weights, _mm512_set1_ps(b[i]), x[i]);
      }
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kUnit; ++i) x[i] = _mm512_max_ps(_mm512_setzero_ps(), x[i]);  // a NaN stays a NaN
    }
#pragma GCC unroll 4
    for (std::size_t i = 0; kOfGates && i < kUnit; ++i)
      x[i] = _mm512_mul_ps(x[i], _mm512_set1_ps(factors(panel)[transition + i]));
  }

  // Two by two blocks of sums, while a pair is split. The first parts are loaded already.
  PEARL_AMX_SIMD __attribute__((noinline)) void multiply_pairs(std::size_t row, std::size_t column, const Task& task,
                                                               std::size_t next_row, std::size_t next_column) {
    constexpr std::size_t kBytes = kSquare * sizeof(float);
    float* const c = products_ + row * kLanes * kSquare + column * kLanes;
    float* const below = c + kLanes * kSquare;
    if (adds_) {
      _tile_loadd(0, c, kBytes);
      _tile_loadd(1, c + kLanes, kBytes);
      _tile_loadd(2, below, kBytes);
      _tile_loadd(3, below + kLanes, kBytes);
    } else {
      zero_sums();
    }
    // A unit of work after every few products, so that the vector units do not fall behind. Not in the last turns: the
    // split numbers are multiplied next.
    constexpr std::size_t kProducts = kOfGates ? Parts : Parts * (Parts + 1) / 2;
    constexpr std::size_t kTurns = kProducts == 6 ? 10 : 2 * kProducts - 1;
    std::size_t turns = 0;
    const auto work = [&] PEARL_AMX_SIMD __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (std::size_t unit = 0; unit < kUnits; ++unit) {
        if (unit * kTurns / kUnits != turns) continue;
        if (task.of == Task::left) split_left(task.at, task.block, unit);
        if (task.of == Task::right) split_right(task.at, task.block, unit);
        if (task.of == Task::sums) finish_sums(task.at, task.block, unit);
      }
      ++turns;
    };
    const auto products = [&] PEARL_AMX_SIMD __attribute__((always_inline)) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      work();
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      work();
    };
    // Small products first.
    products();
    if constexpr (kOfGates) {
      for (std::size_t part = Parts - 1; part-- > 0;) {
        load_right(column, part);
        products();
      }
    } else {
      if constexpr (Parts == 3) {
        load_right(column, 1);
        products();
        load_left(row, 1);
        products();
        load_right(column, 0);
        products();
        load_left(row, 2);
        products();
      } else {
        load_left(row, 1);
        load_right(column, 0);
        products();
      }
      load_left(row, 0);
      products();
    }
    if (adds_few_) {
      _tile_loadd(4, held_.few_left[row * kLanes], 64);
      _tile_loadd(5, held_.few_left[(row + 1) * kLanes], 64);
      _tile_loadd(6, held_.few_right[column], 64);
      _tile_loadd(7, held_.few_right[column + 1], 64);
      products();
    }
    load_first(next_row, next_column);
    _tile_stored(0, c, kBytes);
    _tile_stored(1, c + kLanes, kBytes);
    _tile_stored(2, below, kBytes);
    _tile_stored(3, below + kLanes, kBytes);
  }
  PEARL_AMX_INLINE void load_first(std::size_t row, std::size_t column) const {
    finish_stores();
    load_left(row, 0);
    load_right(column, Parts - 1);
  }
  PEARL_AMX_INLINE void load_left(std::size_t block, std::size_t part) const {
    _tile_loadd(4, held_.left(block) + part * kApart, 64);
    _tile_loadd(5, held_.left(block + 1) + part * kApart, 64);
  }
  PEARL_AMX_INLINE void load_right(std::size_t block, std::size_t part) const {
    _tile_loadd(6, held_.right(block) + part * kApart, 64);
    _tile_loadd(7, held_.right(block + 1) + part * kApart, 64);
  }

  // Four rows of two by two blocks of sums, of gates' products, times their weights of the single output.
  PEARL_AMX_SIMD __attribute__((noinline)) void finish_sums(std::size_t block, std::size_t column, std::size_t unit) {
    const std::size_t row = block * kLanes + unit * kUnit, first = row * kSquare + column * kLanes;
    const float *const sums = products_ + first, *const weights = g_.made_slopes.a + row;
    float* const to = g_.weights + first;
    if constexpr (From == Slopes::of_signs) {
      const float* const own = layer_.weights + first;
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kUnit; ++i) {
        __m512 product = _mm512_load_ps(sums_[row + i]);
#pragma GCC unroll 2
        for (std::size_t at = i * kSquare; at < i * kSquare + 2 * kLanes; at += kLanes)
          product = _mm512_fmadd_ps(_mm512_loadu_ps(sums + at), _mm512_loadu_ps(own + at), product);
        _mm512_store_ps(sums_[row + i], product);
      }
    }
    if (g_.accumulate) {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < 2 * kUnit; ++i) {
        const std::size_t at = i / 2 * kSquare + i % 2 * kLanes;
        _mm512_storeu_ps(to + at, _mm512_fmadd_ps(_mm512_loadu_ps(sums + at), _mm512_set1_ps(weights[i / 2]),
                                                  _mm512_loadu_ps(to + at)));
      }
    } else {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < 2 * kUnit; ++i) {
        const std::size_t at = i / 2 * kSquare + i % 2 * kLanes;
        _mm512_storeu_ps(to + at, _mm512_mul_ps(_mm512_loadu_ps(sums + at), _mm512_set1_ps(weights[i / 2])));
      }
    }
  }

  // Of 16 rows, the totals of their sums.
  PEARL_AMX_INLINE __m512 totals(std::size_t row) const {
    __m512 total = _mm512_setzero_ps();
    for (std::size_t column = 0; column < kLanes; column += 4) {
      __m512 turned[4];
      turn_columns(sums_[row] + column, kLanes, turned);
      total =
          _mm512_add_ps(total, _mm512_add_ps(_mm512_add_ps(turned[0], turned[1]), _mm512_add_ps(turned[2], turned[3])));
    }
    return total;
  }
  // The bias's gradient.
  PEARL_AMX_SIMD void add_up() const {
    for (std::size_t row = 0; row < kSquare; row += kLanes) {
      float* const bias = g_.bias + row;
      __m512 total = totals(row);
      if constexpr (kOfGates) total = _mm512_mul_ps(total, _mm512_loadu_ps(g_.made_slopes.a + row));
      _mm512_storeu_ps(bias, g_.accumulate ? _mm512_add_ps(_mm512_loadu_ps(bias), total) : total);
    }
  }

  static constexpr std::size_t kHalf = 2 * kSquare;  // signs of half a panel, of two layers

  const LayerGradient& g_;
  const SignedLayer layer_;
  Held& held_;
  float* const products_;                 // where the products are summed up
  bool adds_ = false, adds_few_ = false;  // whether products add to what memory has, and the few transitions
  alignas(64) float sums_[kSquare][kLanes];  // of slopes, of factors, or of sums times the layer's weights
  alignas(64) float weights_of_x_[kRemade][kSquare];
};

}  // namespace

template <std::size_t Parts>
void square_gradient(const LayerGradient& gradient) {
  const bool makes_x = gradient.made_x.m > 0, of_gates = gradient.made_slopes.depth == 1;
  if (gradient.made_slopes.m == 0) {
    Gradient<Parts, Slopes::stored, false>(gradient).run();
    if (gradient.bias != nullptr)
      avx512_learner_kernels()->sum_transitions(gradient.slopes, kSquare, gradient.panels, gradient.bias,
                                                gradient.accumulate);
  } else if (makes_x && of_gates) {
    Gradient<Parts, Slopes::of_gates, true>(gradient).run();
  } else if (makes_x) {
    Gradient<Parts, Slopes::made, true>(gradient).run();
  } else if (of_gates) {
    Gradient<Parts, Slopes::of_gates, false>(gradient).run();
  } else {
    Gradient<Parts, Slopes::made, false>(gradient).run();
  }
}

template <std::size_t Parts>
void gradient_of_signs(const LayerGradient& gradient, const SignedLayer& layer) {
  if (gradient.made_x.m > 0)
    Gradient<Parts, Slopes::of_signs, true>(gradient, layer).run();
  else
    Gradient<Parts, Slopes::of_signs, false>(gradient, layer).run();
}

template void square_gradient<2>(const LayerGradient&);
template void square_gradient<3>(const LayerGradient&);
template void gradient_of_signs<2>(const LayerGradient&, const SignedLayer&);
template void gradient_of_signs<3>(const LayerGradient&, const SignedLayer&);

}  // namespace pearl::learner::amx

#endif
