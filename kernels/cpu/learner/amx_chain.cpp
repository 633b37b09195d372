// Products in AMX that follow each other in networks whose hidden layers are 64 wide.
//
// A product of 64 x 64 by 16 columns takes AMX 0.25 us, and the numbers around it need as long to move between the L1 and
// L2 caches: split, they are half as large again. So each block of 16 columns goes through all products before the next
// begins, and what is split stays in the L1 cache. While the tiles' unit is busy with 32 steps of the second product, the
// vector units make the first product's rows of the next block and split them, and finish the block before, which
// includes its share of the third product. A forward pass with a batch of 100 takes 0.6 to 0.8 of AVX-512's time, a
// backward pass 0.8 to 1.0.
#include "amx_blocks.hpp"

#if defined(PEARL_AMX)

namespace pearl::learner::amx {
namespace {

constexpr std::size_t kWidth = 64, kBlocks = kWidth / kLanes, kSteps = kWidth / kDepth;
constexpr std::size_t kUnit = 4;           // rows that are finished at once
constexpr std::size_t kLeastColumns = 64;  // for which splitting the weights is worth it (measured)

// What becomes of a sum.
enum class Ending { rectified, gated, any };

bool is_rectified(const Gemm& g) { return g.relu && g.bias != nullptr && g.gate == nullptr && !g.accumulate; }
bool is_gated(const Gemm& g) { return g.gate != nullptr && g.bias == nullptr && !g.relu && !g.accumulate; }

// Adds the product of two tiles to a third: the intrinsic takes no numbers of a template.
template <int To, int Left, int Right>
PEARL_AMX_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(Left), "i"(Right));
}

// A block of columns.
struct Place {
  std::ptrdiff_t panel = 0, column = 0;
  std::ptrdiff_t in(std::ptrdiff_t panel_floats) const { return panel * panel_floats + column; }
};

// Rows of the second product's b, steps i and i + 16 of 32, for a block of columns: the first product's, or in memory.
// Like Finisher a copy of what it needs, so that no store of numbers can change it.
template <std::size_t Parts, bool HasFirst, Ending End>
struct Maker {
  const float* x;
  std::ptrdiff_t x_step;
  const float* a;
  std::ptrdiff_t a_row, a_step;
  std::size_t depth;
  const float *bias, *gate;
  float* c;
  std::ptrdiff_t c_row;
  bool keeps;
  std::uint16_t* to;

  PEARL_AMX_INLINE void make() {
    constexpr auto lanes = static_cast<std::ptrdiff_t>(kLanes);
    __m512 even, odd;
    if constexpr (!HasFirst) {
      even = _mm512_loadu_ps(x);
      odd = _mm512_loadu_ps(x + lanes * x_step);
      x += x_step;
    } else {
      const __m512 none = _mm512_setzero_ps();
      even = odd = none;
      if constexpr (End == Ending::rectified) {
        even = _mm512_set1_ps(*bias);
        odd = _mm512_set1_ps(bias[lanes]);
        ++bias;
      }
      const float *from = x, *for_even = a, *for_odd = a + lanes * a_row;
      for (std::size_t k = 0; k < depth; ++k, from += x_step, for_even += a_step, for_odd += a_step) {
        const __m512 number = _mm512_loadu_ps(from);
        even = _mm512_fmadd_ps(number, _mm512_set1_ps(*for_even), even);
        odd = _mm512_fmadd_ps(number, _mm512_set1_ps(*for_odd), odd);
      }
      a += a_row;
      if constexpr (End == Ending::rectified) {
        even = _mm512_max_ps(none, even);  // a NaN stays a NaN
        odd = _mm512_max_ps(none, odd);
      } else {
        even = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_loadu_ps(gate), none, _CMP_GT_OQ), even);
        odd = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_loadu_ps(gate + lanes * c_row), none, _CMP_GT_OQ), odd);
        gate += c_row;
      }
      if (keeps) {
        _mm512_storeu_ps(c, even);
        _mm512_storeu_ps(c + lanes * c_row, odd);
        c += c_row;
      }
    }
    split<Parts>(even, odd, to);
    to += kDepth;
  }
};

// Four rows at a time of a block of the second product, and what they add to the third.
template <Ending End>
struct Finisher {
  const float *sums, *bias, *gate;
  float* c;
  std::ptrdiff_t c_row;
  bool keeps, relu, accumulate;
  float* ends;
  std::size_t end_rows;
  const float *end_a, *end_bias;
  std::ptrdiff_t end_row, end_step;
  std::size_t done;

  PEARL_AMX_INLINE void finish() {
    const __m512 none = _mm512_setzero_ps();
    __m512 sum[kUnit];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i, c += c_row) {
      sum[i] = _mm512_load_ps(sums + i * kLanes);
      if (End == Ending::rectified || (End == Ending::any && bias != nullptr))
        sum[i] = _mm512_add_ps(sum[i], _mm512_set1_ps(bias[i]));
      if (End == Ending::any && accumulate) sum[i] = _mm512_add_ps(sum[i], _mm512_loadu_ps(c));
      if (End == Ending::rectified || (End == Ending::any && relu)) sum[i] = _mm512_max_ps(none, sum[i]);
      if (End == Ending::gated || (End == Ending::any && gate != nullptr)) {
        sum[i] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_loadu_ps(gate), none, _CMP_GT_OQ), sum[i]);
        gate += c_row;
      }
      if (keeps) _mm512_storeu_ps(c, sum[i]);
    }
    sums += kUnit * kLanes;
    if (End == Ending::rectified || (End == Ending::any && bias != nullptr)) bias += kUnit;
    const float* weights = end_a;
    for (std::size_t o = 0; o < end_rows; ++o, weights += end_row) {
      __m512 end = done > 0              ? _mm512_load_ps(ends + o * kLanes)
                   : end_bias == nullptr ? none
                                         : _mm512_set1_ps(end_bias[o]);
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kUnit; ++i)
        end = _mm512_fmadd_ps(sum[i], _mm512_set1_ps(weights[static_cast<std::ptrdiff_t>(i) * end_step]), end);
      _mm512_store_ps(ends + o * kLanes, end);
    }
    end_a += static_cast<std::ptrdiff_t>(kUnit) * end_step;
    done += kUnit;
  }
};

template <std::size_t Parts, bool HasFirst, Ending End>
class SmallChain {
 public:
  explicit SmallChain(const Chain& chain)
      : first_(chain.first), g_(chain.second), third_(chain.third), keeps_(chain.keeps) {}

  PEARL_AMX_SIMD void run() {
    left_ = memory((kBlocks + 2) * kSteps * kBlock);
    right_ = left_ + kBlocks * kSteps * kBlock;
    _tile_loadconfig(&kWholeTiles);
    const std::size_t columns = g_.panels > 1 ? (g_.panels - 1) * g_.n + g_.last_n : g_.n;
    Place at, before;
    make_now(at, 0);
    split_left(0);
    for (std::size_t column = 0; column < columns; column += kLanes, turn_ ^= 1) {
      Place next = at;
      next.column += kLanes;
      if (next.column == static_cast<std::ptrdiff_t>(g_.n)) next = {at.panel + 1, 0};
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      const bool makes = column + kLanes < columns, finishes = column > 0;
      finisher_ = finisher(before);
      multiply_step(0, maker(next, 0, turn_ ^ 1), makes, finishes);
      if (column == 0) {
        make_now(at, 1);
        split_left(1);
      }
      multiply_step(1, maker(next, 1, turn_ ^ 1), makes, finishes);
      if (finishes) end(before);
      _tile_stored(0, sums_, 64);
      _tile_stored(1, sums_ + kLanes * kLanes, 64);
      _tile_stored(2, sums_ + 2 * kLanes * kLanes, 64);
      _tile_stored(3, sums_ + 3 * kLanes * kLanes, 64);
      before = at;
      at = next;
    }
    finisher_ = finisher(before);
    for (std::size_t unit = 0; unit < kWidth / kUnit; ++unit) finisher_.finish();
    end(before);
    _tile_release();
  }

 private:
  // The products of 32 steps, while those rows of the next block are made if there is one. They are made so early because
  // a tile's load waits until what it loads has left the queue of stores, which is behind products that began before.
  // (Compilers do not know that a tile's load reads memory. They keep stores before it because a tile's store, or a call,
  // is between.)
  PEARL_AMX_INLINE void multiply_step(std::size_t step, Maker<Parts, HasFirst, End> maker, bool makes, bool finishes) {
    const std::uint16_t *left = left_ + step * kBlocks * kBlock, *right = right_ + (turn_ * kSteps + step) * kBlock;
    Finisher<End> finisher = finisher_;
    const auto work = [&](std::size_t rows, std::size_t units) PEARL_AMX_SIMD __attribute__((always_inline)) {
      if (makes)
#pragma GCC unroll 6
        for (std::size_t i = 0; i < rows; ++i) maker.make();
      if (finishes)
#pragma GCC unroll 3
        for (std::size_t i = 0; i < units; ++i) finisher.finish();
    };
    // All parts of b stay in tiles, and each part of a is loaded once: the units that load have time for vectors. Small
    // products first.
    _tile_loadd(4, right, 64);
    _tile_loadd(5, right + kTileNumbers, 64);
    if constexpr (Parts == 3) {
      _tile_loadd(6, right + 2 * kTileNumbers, 64);
      products_of<0, 2>(left);
      products_of<1, 2>(left);
      products_of<2, 2>(left);
      products_of<3, 2>(left);
      work(3, 1);
      products_of<0, 1>(left);
      products_of<1, 1>(left);
      work(3, 1);
      products_of<2, 1>(left);
      products_of<3, 1>(left);
      work(2, 1);
      products_of<0, 0>(left);
      work(2, 1);
      products_of<1, 0>(left);
      work(2, 1);
      products_of<2, 0>(left);
      work(2, 1);
      products_of<3, 0>(left);
      work(2, 2);
    } else {
      products_of<0, 1>(left);
      products_of<1, 1>(left);
      products_of<2, 1>(left);
      products_of<3, 1>(left);
      work(6, 3);
      products_of<0, 0>(left);
      products_of<1, 0>(left);
      work(5, 3);
      products_of<2, 0>(left);
      products_of<3, 0>(left);
      work(5, 2);
    }
    finisher_ = finisher;
  }
  // A part of a block of a by the parts of b that it meets.
  template <int Block, std::size_t Part>
  PEARL_AMX_INLINE static void products_of(const std::uint16_t* left) {
    _tile_loadd(7, left + Block * kBlock + Part * kTileNumbers, 64);
    if constexpr (Parts - Part == 3) multiply_tiles<Block, 7, 6>();
    if constexpr (Parts - Part >= 2) multiply_tiles<Block, 7, 5>();
    multiply_tiles<Block, 7, 4>();
  }

  Maker<Parts, HasFirst, End> maker(const Place& at, std::size_t step, std::size_t turn) const {
    const auto row = static_cast<std::ptrdiff_t>(step * kDepth);
    std::uint16_t* const to = right_ + (turn * kSteps + step) * kBlock;
    if constexpr (!HasFirst) {
      Maker<Parts, HasFirst, End> maker{};
      maker.x = g_.b + at.in(g_.b_panel) + row * g_.b_step;
      maker.x_step = g_.b_step;
      maker.to = to;
      return maker;
    } else {
      const std::ptrdiff_t c = at.in(first_.c_panel) + row * first_.c_row;
      return {first_.b + at.in(first_.b_panel),
              first_.b_step,
              first_.a + row * first_.a_row,
              first_.a_row,
              first_.a_step,
              first_.depth,
              first_.bias == nullptr ? nullptr : first_.bias + row,
              first_.gate == nullptr ? nullptr : first_.gate + c,
              first_.c + c,
              first_.c_row,
              keeps_,
              to};
    }
  }
  Finisher<End> finisher(const Place& at) {
    const std::ptrdiff_t c = at.in(g_.c_panel);
    return {sums_,        g_.bias,       g_.gate == nullptr ? nullptr : g_.gate + c,
            g_.c + c,     g_.c_row,      keeps_ || third_.m == 0,
            g_.relu,      g_.accumulate, ends_,
            third_.m,     third_.a,      third_.bias,
            third_.a_row, third_.a_step, 0};
  }
  // Stores the third product.
  PEARL_AMX_INLINE void end(const Place& at) const {
    if (third_.m == 0) return;
    float* c = third_.c + at.in(third_.c_panel);
    for (std::size_t o = 0; o < third_.m; ++o, c += third_.c_row)
      _mm512_storeu_ps(c, _mm512_load_ps(ends_ + o * kLanes));
  }
  PEARL_AMX_SIMD __attribute__((noinline)) void make_now(const Place& at, std::size_t step) {
    Maker<Parts, HasFirst, End> now = maker(at, step, 0);
    for (std::size_t i = 0; i < kLanes; ++i) now.make();
  }

  PEARL_AMX_SIMD __attribute__((noinline)) void split_left(std::size_t step) {
    const float* a = g_.a + static_cast<std::ptrdiff_t>(step * kDepth) * g_.a_step;
    std::uint16_t* to = left_ + step * kBlocks * kBlock;
    const auto lanes = static_cast<std::ptrdiff_t>(kLanes);
    for (std::size_t block = 0; block < kBlocks; ++block, a += lanes * g_.a_row, to += kBlock) {
      const float *even = a, *odd = a + lanes;
      std::ptrdiff_t row = g_.a_row;
      if (g_.a_step != 1) {
        const auto next = static_cast<std::size_t>(g_.a_step);
        avx512_.transpose(a, kLanes, kLanes, next, turned_[0], kLanes);
        avx512_.transpose(a + lanes * g_.a_step, kLanes, kLanes, next, turned_[1], kLanes);
        even = turned_[0];
        odd = turned_[1];
        row = lanes;
      }
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kLanes; ++i) {
        const std::ptrdiff_t from = static_cast<std::ptrdiff_t>(i) * row;
        split<Parts>(_mm512_loadu_ps(even + from), _mm512_loadu_ps(odd + from), to + i * kDepth);
      }
    }
  }

  const Gemm first_, g_, third_;
  const bool keeps_;
  const LearnerKernels& avx512_ = *avx512_learner_kernels();
  std::uint16_t *left_ = nullptr, *right_ = nullptr;
  std::size_t turn_ = 0;
  Finisher<End> finisher_ = {};
  alignas(64) float sums_[kWidth * kLanes];
  alignas(64) float ends_[Chain::kMostRows * kLanes];
  alignas(64) float turned_[2][kLanes * kLanes];
};

bool fits(const Chain& chain) {
  const Gemm &first = chain.first, &g = chain.second, &third = chain.third;
  const std::size_t columns = g.panels > 1 ? (g.panels - 1) * g.n + g.last_n : g.n;
  if (g.m != kWidth || g.depth != kWidth || g.segment < kWidth || columns < kLeastColumns || columns % kLanes != 0 ||
      g.n % kLanes != 0 || g.bias_of_columns || third.m > Chain::kMostRows || third.relu || third.gate != nullptr ||
      third.accumulate || third.bias_of_columns)
    return false;
  if (first.m == 0) return true;
  return first.depth <= Chain::kMostTerms && first.segment >= first.depth &&
         ((is_rectified(first) && is_rectified(g)) || (is_gated(first) && is_gated(g)));
}

}  // namespace

template <std::size_t Parts>
bool multiply_chain(const Chain& chain) {
  if (!fits(chain)) return false;
  const bool has_first = chain.first.m > 0;
  if (has_first && is_rectified(chain.second))
    SmallChain<Parts, true, Ending::rectified>(chain).run();
  else if (has_first)
    SmallChain<Parts, true, Ending::gated>(chain).run();
  else if (is_rectified(chain.second))
    SmallChain<Parts, false, Ending::rectified>(chain).run();
  else if (is_gated(chain.second))
    SmallChain<Parts, false, Ending::gated>(chain).run();
  else
    SmallChain<Parts, false, Ending::any>(chain).run();
  return true;
}

template bool multiply_chain<2>(const Chain&);
template bool multiply_chain<3>(const Chain&);

}  // namespace pearl::learner::amx

#endif
