// Products in AMX that follow each other in networks whose hidden layers are 64 wide.
//
// A product of 64 x 64 by 16 columns takes AMX 0.25 us. Moving its numbers between the L1 and L2 caches takes as long,
// since split numbers are half as large again. So each block of 16 columns goes through all products before the next
// begins, and split numbers stay in the L1 cache. While the tiles' unit multiplies a block, the vector units prepare
// the next one and finish the one before, including its share of the first and of the third product.
//
// A backward pass through a single output multiplies gates, as gradients do (amx_gradient.cpp): a of the second product by
// the output's weights, once, and sums by their transition's factor at the end.
#include "amx_blocks.hpp"
#include "avx512_turn.hpp"

#if defined(PEARL_AMX)

namespace pearl::learner::amx {
namespace {

constexpr std::size_t kWidth = kSquare, kBlocks = kWidth / kLanes, kSteps = kWidth / kDepth;
constexpr std::size_t kLeastColumns = 64;  // for which splitting the weights is worth it (measured)
constexpr std::size_t kTurns = 8;          // of the vector units in the products of 32 steps
constexpr std::size_t kMade = kLanes / kTurns, kFinished = kDepth / kTurns;  // rows, or pairs of them, in a turn

// Where rows of the second product's b come from: the results of a first product, with a bias and a ReLU or gated, its
// gates, or memory.
enum class Source { rectified, gated, gates, memory };
// How a sum is finished.
enum class Ending { rectified, gated, any };

bool is_rectified(const Gemm& g) { return g.is_rectified() && g.bias != nullptr; }

// A block of columns.
struct Place {
  std::ptrdiff_t panel = 0, column = 0;
  std::ptrdiff_t in(std::ptrdiff_t panel_floats) const { return panel * panel_floats + column; }
};

// The content of the L1 cache. A load waits for a recent store if the last 12 bits of their addresses agree; a tile's
// load then waits long, as stores are late while tiles are busy. So stored numbers have a quarter of each page for
// themselves.
struct Held {
  using Tile = std::uint16_t[kTileNumbers];
  // A quarter of each page for stored numbers, and one for each part of the second product's a.
  struct Page {
    Tile stored, left[kParts];
  };
  Page pages[kBlocks * kSteps];
  float sums_[2][kLanes * kLanes];
  float third_weights[Chain::kMostRows][kWidth];
  float first_weights[Chain::kMostTerms][kWidth];
  float third_sums[Chain::kMostRows][kLanes];

  std::uint16_t* right(std::size_t step) { return pages[step * kParts].stored; }
  std::uint16_t* left(std::size_t step, std::size_t block) { return pages[step * kBlocks + block].left[0]; }
  // Four would fill the cache sets of that quarter.
  float* sums(std::size_t block) {
    return block < 2 ? reinterpret_cast<float*>(pages[kSteps * kParts + block].stored) : sums_[block - 2];
  }
};
constexpr std::size_t kPage = sizeof(Held::Page) / sizeof(std::uint16_t), kPageFloats = kPage / 2;
static_assert(kSteps * kParts + 2 <= kBlocks * kSteps);

// `Terms` of a first product; 0: any number.
template <std::size_t Parts, Source From, std::size_t Terms, Ending End>
class SmallChain {
 public:
  explicit SmallChain(const Chain& chain)
      : first_(chain.first),
        g_(chain.second),
        third_(chain.third),
        keeps_first_(chain.keeps_first),
        keeps_second_(chain.keeps_second),
        first_signs_(chain.first_signs),
        second_signs_(chain.second_signs),
        held_(pages<Held>()) {}

  PEARL_AMX_SIMD void run() {
    set_up_tiles(kWholeTiles);
    keep_awake();
    prepare();
    const std::size_t columns = g_.columns();
    Place before, at, next = after(at);
    for (std::size_t step = 0; step < kSteps; ++step) {
      make_all(at, step);
      keep_awake();
    }
    for (std::size_t column = 0; column < columns; column += kLanes) {
      const bool starts = column == 0, makes = column + kLanes < columns;
      begin_third();
      zero_sums();
#pragma GCC unroll 1
      for (std::size_t step = 0; step < kSteps; ++step) {
        const Made then = made(next, step);
        if (starts) {
          multiply_first(step);
          if (makes) make_all(next, step);
          continue;
        }
        const Finished done = finished(before, step);
        multiply_step(step, [&](std::size_t turn) PEARL_AMX_SIMD __attribute__((always_inline)) {
          if (makes) make(then, turn);
          finish(done, turn);
        });
      }
      if (!starts) end_third(before);
      store_sums([&](std::size_t i) { return held_.sums(i); });
      before = at;
      at = next;
      next = after(next);
    }
    begin_third();
#pragma GCC unroll 1
    for (std::size_t step = 0; step < kSteps; ++step) {
      const Finished done = finished(before, step);
#pragma GCC unroll 2
      for (std::size_t turn = 0; turn < kTurns; ++turn) finish(done, turn);
    }
    keep_awake();
    end_third(before);
    give_up_tiles();
  }

 private:
  // Of a row and a block of columns.
  static std::uint16_t* of_block(std::uint16_t* signs, const Place& at, std::size_t row) {
    const auto block = static_cast<std::size_t>(2 * at.panel + (at.column != 0 ? 1 : 0));
    return signs == nullptr ? nullptr : signs + 2 * kWidth * block + row;
  }
  Place after(Place at) const {
    at.column += kLanes;
    return at.column == static_cast<std::ptrdiff_t>(g_.n) ? Place{at.panel + 1, 0} : at;
  }

  // The products of 32 steps of the first block: those of a block of a follow when the next block has been split.
  PEARL_AMX_SIMD __attribute__((noinline)) void multiply_first(std::size_t step) {
    const std::uint16_t* const left = held_.left(step, 0);
    split_left(step, 0);
    load_right(step);
    split_left(step, 1);
    multiply_all<0>(left);
    split_left(step, 2);
    multiply_all<1>(left);
    split_left(step, 3);
    multiply_all<2>(left);
    multiply_all<3>(left);
  }
  template <int Block>
  PEARL_AMX_INLINE static void multiply_all(const std::uint16_t* left) {
    finish_stores();
    if constexpr (Parts == 3) {
      load<Block, 2>(left);
      multiply<Block, 2>();
    }
    load<Block, 1>(left);
    multiply<Block, 1>();
    load<Block, 0>(left);
    multiply<Block, 0>();
  }

  // The products of 32 steps. After every few of them `meanwhile` gives the vector units a turn.
  template <class Meanwhile>
  PEARL_AMX_INLINE void multiply_step(std::size_t step, const Meanwhile& meanwhile) {
    const std::uint16_t* const left = held_.left(step, 0);
    // All parts of b stay in tiles, and each part of a is loaded once: the units that load have time for vectors. It is
    // loaded before a turn's stores, as it may have to wait for them. Small products first.
    load_right(step);
    if constexpr (Parts == 3) {
      load<0, 2>(left);
      multiply<0, 2>();
      load<1, 2>(left);
      multiply<1, 2>();
      load<2, 2>(left);
      multiply<2, 2>();
      load<3, 2>(left);
      multiply<3, 2>();
    }
    load<0, 1>(left);
    if constexpr (Parts == 3) meanwhile(0);
    multiply<0, 1>();
    load<1, 1>(left);
    multiply<1, 1>();
    load<2, 1>(left);
    if constexpr (Parts == 2) meanwhile(0);
    meanwhile(1);
    multiply<2, 1>();
    load<3, 1>(left);
    multiply<3, 1>();
    load<0, 0>(left);
    meanwhile(2);
    multiply<0, 0>();
    load<1, 0>(left);
    meanwhile(3);
    multiply<1, 0>();
    load<2, 0>(left);
    meanwhile(4);
    multiply<2, 0>();
    load<3, 0>(left);
    meanwhile(5);
    multiply<3, 0>();
    meanwhile(6);
    meanwhile(7);
  }
  PEARL_AMX_INLINE void load_right(std::size_t step) const {
    const std::uint16_t* const right = held_.right(step);
    finish_stores();
    _tile_loadd(4, right, 64);
    if constexpr (kRightParts > 1) _tile_loadd(5, right + kPage, 64);
    if constexpr (kRightParts > 2) _tile_loadd(6, right + 2 * kPage, 64);
  }
  template <int Block, std::size_t Part>
  PEARL_AMX_INLINE static void load(const std::uint16_t* left) {
    const std::uint16_t* const from = left + Block * kPage + Part * kTileNumbers;
    if constexpr (kLeftTile<Block> == 6)
      _tile_loadd(6, from, 64);
    else
      _tile_loadd(7, from, 64);
  }
  // A part of a block of a, which is loaded, by the parts of b that it meets.
  template <int Block, std::size_t Part>
  PEARL_AMX_INLINE static void multiply() {
    constexpr std::size_t met = std::min(kRightParts, Parts - Part);
    if constexpr (met == 3) multiply_tiles<Block, kLeftTile<Block>, 6>();
    if constexpr (met >= 2) multiply_tiles<Block, kLeftTile<Block>, 5>();
    multiply_tiles<Block, kLeftTile<Block>, 4>();
  }

  // Rows of the second product's b, 32 of them, for a block of columns.
  struct Made {
    const float *x, *weights, *bias, *gate;
    float* c;
    std::uint16_t *to, *signs;
    std::size_t terms;
    bool keeps;
  };
  PEARL_AMX_INLINE Made made(const Place& at, std::size_t step) const {
    const std::size_t row = step * kDepth;
    std::uint16_t* const to = held_.right(step);
    if constexpr (From == Source::memory)
      return {g_.b + at.in(g_.b_panel) + row * kPanel, nullptr, nullptr, nullptr, nullptr, to, nullptr, 0, false};
    const std::ptrdiff_t c = at.in(first_.c_panel) + static_cast<std::ptrdiff_t>(row * kPanel);
    constexpr bool gated = From != Source::rectified;
    return {first_.b + at.in(first_.b_panel),
            gated ? held_.first_weights[0] + row : first_.a + row * first_.depth,
            gated ? nullptr : first_.bias + row,
            gated ? first_.gate + c : nullptr,
            first_.c + c,
            to,
            of_block(first_signs_, at, row),
            first_.depth,
            keeps_first_};
  }
  // Steps i and i + 16 of 32 are a pair.
  PEARL_AMX_INLINE static void make(const Made& m, std::size_t turn) {
    const __m512 none = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (std::size_t i = turn * kMade; i < (turn + 1) * kMade; ++i) {
      __m512 even, odd;
      if constexpr (From == Source::memory) {
        even = _mm512_loadu_ps(m.x + i * kPanel);
        odd = _mm512_loadu_ps(m.x + (i + kLanes) * kPanel);
      } else if constexpr (From == Source::rectified) {
        const std::size_t terms = Terms > 0 ? Terms : m.terms;
        const float *const weights = m.weights + i * terms, *const lower = weights + kLanes * terms;
        even = _mm512_set1_ps(m.bias[i]);
        odd = _mm512_set1_ps(m.bias[i + kLanes]);
#pragma GCC unroll 8
        for (std::size_t k = 0; k < terms; ++k) {
          const __m512 number = _mm512_loadu_ps(m.x + k * kPanel);
          even = _mm512_fmadd_ps(number, _mm512_set1_ps(weights[k]), even);
          odd = _mm512_fmadd_ps(number, _mm512_set1_ps(lower[k]), odd);
        }
        even = _mm512_max_ps(none, even);  // a NaN stays a NaN
        odd = _mm512_max_ps(none, odd);
      } else {
        const float* const gate = m.gate + i * kPanel;
        const __mmask16 even_passes = m.signs != nullptr ? m.signs[i] : positive(_mm512_loadu_ps(gate));
        const __mmask16 odd_passes =
            m.signs != nullptr ? m.signs[i + kLanes] : positive(_mm512_loadu_ps(gate + kLanes * kPanel));
        if constexpr (From == Source::gates) {
          _mm512_store_si512(m.to + i * kDepth, ones(even_passes, odd_passes));
          continue;
        }
        even = odd = none;
        const std::size_t terms = Terms > 0 ? Terms : m.terms;
#pragma GCC unroll 4
        for (std::size_t k = 0; k < terms; ++k) {
          const float* const weights = m.weights + k * kWidth + i;
          const __m512 number = _mm512_loadu_ps(m.x + k * kPanel);
          even = _mm512_maskz_fmadd_ps(even_passes, number, _mm512_set1_ps(weights[0]), even);
          odd = _mm512_maskz_fmadd_ps(odd_passes, number, _mm512_set1_ps(weights[kLanes]), odd);
        }
      }
      if (From != Source::memory && m.keeps) {
        _mm512_storeu_ps(m.c + i * kPanel, even);
        _mm512_storeu_ps(m.c + (i + kLanes) * kPanel, odd);
      }
      if (From == Source::rectified && m.signs != nullptr) {
        m.signs[i] = positive(even);
        m.signs[i + kLanes] = positive(odd);
      }
      split<Parts, false, kPage>(even, odd, m.to + i * kDepth);
    }
  }
  // All 32 rows, for the first block.
  PEARL_AMX_SIMD __attribute__((noinline)) void make_all(const Place& at, std::size_t step) const {
    const Made m = made(at, step);
#pragma GCC unroll 1
    for (std::size_t turn = 0; turn < kTurns; ++turn) make(m, turn);
  }

  // Rows of the second product's result, 32 of them, for a block of columns.
  struct Finished {
    const float *sums, *bias, *gate, *factors, *third_weights;
    float *c, *third_sums;
    std::uint16_t* signs;
    std::size_t third_rows;
    bool keeps, relu, accumulate;
    std::size_t next_sums;
  };
  PEARL_AMX_INLINE Finished finished(const Place& at, std::size_t step) const {
    const std::size_t row = step * kDepth;
    const std::ptrdiff_t c = at.in(g_.c_panel) + static_cast<std::ptrdiff_t>(row * kPanel);
    return {held_.sums(row / kLanes),
            g_.bias == nullptr ? nullptr : g_.bias + row,
            g_.gate == nullptr ? nullptr : g_.gate + c,
            From == Source::gates ? first_.b + at.in(first_.b_panel) : nullptr,
            held_.third_weights[0] + row,
            g_.c + c,
            held_.third_sums[0],
            of_block(second_signs_, at, row),
            third_.m,
            keeps_second_ || third_.m == 0,
            g_.relu,
            g_.accumulate,
            step == 0 ? kPageFloats : kLanes * kLanes};
  }
  // Four rows at a time, and what they add to the third product.
  PEARL_AMX_INLINE static void finish(const Finished& f, std::size_t turn) {
    const __m512 none = _mm512_setzero_ps();
    const std::size_t from = turn * kFinished;
    const __m512 factors = From == Source::gates ? _mm512_loadu_ps(f.factors) : none;
    __m512 sum[kFinished];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kFinished; ++i) {
      const std::size_t row = from + i;
      float* const c = f.c + row * kPanel;
      sum[i] = _mm512_load_ps(f.sums + row / kLanes * f.next_sums + row % kLanes * kLanes);
      if (End == Ending::rectified || (End == Ending::any && f.bias != nullptr))
        sum[i] = _mm512_add_ps(sum[i], _mm512_set1_ps(f.bias[row]));
      if (End == Ending::any && f.accumulate) sum[i] = _mm512_add_ps(sum[i], _mm512_loadu_ps(c));
      if (End == Ending::rectified || (End == Ending::any && f.relu)) sum[i] = _mm512_max_ps(none, sum[i]);
      if (End == Ending::gated || (End == Ending::any && f.gate != nullptr)) {
        const __mmask16 passes = f.signs != nullptr ? f.signs[row] : positive(_mm512_loadu_ps(f.gate + row * kPanel));
        sum[i] =
            From == Source::gates ? _mm512_maskz_mul_ps(passes, sum[i], factors) : _mm512_maskz_mov_ps(passes, sum[i]);
      }
      if (f.keeps) _mm512_storeu_ps(c, sum[i]);
      if (End == Ending::rectified && f.signs != nullptr) f.signs[row] = positive(sum[i]);
    }
    const float* weights = f.third_weights + from;
    float* to = f.third_sums;
    for (std::size_t o = 0; o < f.third_rows; ++o, weights += kWidth, to += kLanes) {
      __m512 third = _mm512_load_ps(to);
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kFinished; ++i) third = _mm512_fmadd_ps(sum[i], _mm512_set1_ps(weights[i]), third);
      _mm512_store_ps(to, third);
    }
  }

  PEARL_AMX_INLINE void begin_third() const {
    for (std::size_t o = 0; o < third_.m; ++o)
      _mm512_store_ps(held_.third_sums[o],
                      third_.bias == nullptr ? _mm512_setzero_ps() : _mm512_set1_ps(third_.bias[o]));
  }
  PEARL_AMX_INLINE void end_third(const Place& at) const {
    float* c = third_.c + at.in(third_.c_panel);
    for (std::size_t o = 0; o < third_.m; ++o, c += third_.c_row)
      _mm512_storeu_ps(c, _mm512_load_ps(held_.third_sums[o]));
  }

  PEARL_AMX_SIMD __attribute__((noinline)) void prepare() const {
    if constexpr (From == Source::gated || From == Source::gates)
      copy_weights(first_.a, first_.a_step, first_.a_row, first_.depth, held_.first_weights);
    copy_weights(third_.a, third_.a_row, third_.a_step, third_.m, held_.third_weights);
  }

  // A block of 32 steps of the second product's a.
  PEARL_AMX_SIMD __attribute__((noinline)) void split_left(std::size_t step, std::size_t block) const {
    constexpr auto lanes = static_cast<std::ptrdiff_t>(kLanes);
    const std::ptrdiff_t a_row = g_.a_row, a_step = g_.a_step;
    const float* a = g_.a + static_cast<std::ptrdiff_t>(step * kDepth) * a_step +
                     static_cast<std::ptrdiff_t>(block * kLanes) * a_row;
    const float* const weights = held_.first_weights[0] + step * kDepth;
    const auto split_row = [&](__m512 even, __m512 odd, std::uint16_t* to) PEARL_AMX_SIMD
        __attribute__((always_inline)) {
          if constexpr (From == Source::gates) {
            even = _mm512_mul_ps(even, _mm512_load_ps(weights));
            odd = _mm512_mul_ps(odd, _mm512_load_ps(weights + lanes));
          }
          split<Parts>(even, odd, to);
        };
    std::uint16_t* to = held_.left(step, block);
    if (a_step == 1) {
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kLanes; ++i, a += a_row, to += kDepth)
        split_row(_mm512_loadu_ps(a), _mm512_loadu_ps(a + lanes), to);
      return;
    }
    constexpr std::size_t kTurned = 4;
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kLanes; i += kTurned, a += kTurned, to += kTurned * kDepth) {
      __m512 even[kTurned], odd[kTurned];
      turn_columns(a, static_cast<std::size_t>(a_step), even);
      turn_columns(a + lanes * a_step, static_cast<std::size_t>(a_step), odd);
#pragma GCC unroll 4
      for (std::size_t j = 0; j < kTurned; ++j) split_row(even[j], odd[j], to + j * kDepth);
    }
  }

  static constexpr std::size_t kRightParts = From == Source::gates ? 1 : Parts;
  // Two take turns where b leaves room.
  template <int Block>
  static constexpr int kLeftTile = kRightParts < 3 && Block % 2 == 0 ? 6 : 7;

  const Gemm first_, g_, third_;
  const bool keeps_first_, keeps_second_;
  std::uint16_t *const first_signs_, *const second_signs_;
  Held& held_;
};

bool fits(const Chain& chain) {
  const Gemm &first = chain.first, &g = chain.second, &third = chain.third;
  const std::size_t columns = g.columns();
  if (g.m != kWidth || g.depth != kWidth || columns < kLeastColumns || columns % kLanes != 0 || g.n != kPanel ||
      !g.is_of_panels(kPanel) || third.m > Chain::kMostRows || !third.is_plain() || third.bias_of_columns)
    return false;
  if (first.m == 0) return true;
  return first.depth <= Chain::kMostTerms && first.is_of_panels(kPanel) &&
         ((is_rectified(first) && is_rectified(g) && first.a_row == static_cast<std::ptrdiff_t>(first.depth)) ||
          (first.is_gated() && g.is_gated()));
}

}  // namespace

template <std::size_t Parts>
bool multiply_chain(const Chain& chain) {
  if (!fits(chain)) return false;
  if (chain.first.m == 0 && (chain.first_signs != nullptr || chain.second_signs != nullptr)) return false;
  const std::size_t terms = chain.first.m > 0 ? chain.first.depth : 0;
  const bool rectified = terms > 0 && is_rectified(chain.first);
  if (rectified && terms == 3)
    SmallChain<Parts, Source::rectified, 3, Ending::rectified>(chain).run();
  else if (rectified && terms == 4)
    SmallChain<Parts, Source::rectified, 4, Ending::rectified>(chain).run();
  else if (rectified && terms == 8)
    SmallChain<Parts, Source::rectified, 8, Ending::rectified>(chain).run();
  else if (rectified)
    SmallChain<Parts, Source::rectified, 0, Ending::rectified>(chain).run();
  else if (terms == 1 && !chain.keeps_first)
    SmallChain<Parts, Source::gates, 1, Ending::gated>(chain).run();
  else if (terms == 2)
    SmallChain<Parts, Source::gated, 2, Ending::gated>(chain).run();
  else if (terms == 4)
    SmallChain<Parts, Source::gated, 4, Ending::gated>(chain).run();
  else if (terms > 0)
    SmallChain<Parts, Source::gated, 0, Ending::gated>(chain).run();
  else if (is_rectified(chain.second))
    SmallChain<Parts, Source::memory, 0, Ending::rectified>(chain).run();
  else if (chain.second.is_gated())
    SmallChain<Parts, Source::memory, 0, Ending::gated>(chain).run();
  else
    SmallChain<Parts, Source::memory, 0, Ending::any>(chain).run();
  return true;
}

template bool multiply_chain<2>(const Chain&);
template bool multiply_chain<3>(const Chain&);

}  // namespace pearl::learner::amx

#endif
