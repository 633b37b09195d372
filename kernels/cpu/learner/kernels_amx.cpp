// The learner's loops in AVX-512, and its larger matrix products in AMX.
//
// AMX multiplies bfloat16 numbers of eight bits and adds in float32. A float32 number of 24 bits is the sum of three
// such numbers, high + middle + low, without a remainder. Of the nine products of their parts, six are formed: the
// other three are as small as a float32's rounding error, and have either sign. So the result is as exact as AVX-512's
// (docs/native_learner.md: measured errors). The reduced form takes high and middle alone, and three products: 16 bits
// of each factor. Ones and zeros are exact in one part: with them, there are as many products as the other factor has
// parts. Numbers below 2^-126 count as zeros, and an infinite factor gives NaN.
#include "amx_blocks.hpp"
#include "pearl/learner/kernels.hpp"

#if defined(PEARL_AMX)

#include <algorithm>

#include "pearl/learner/byte_convolution.hpp"
#include "pearl/learner/panel_convolution.hpp"

namespace pearl::learner {
namespace {

using namespace amx;

constexpr std::size_t kMostSteps = 8;     // of 32, that are summed at once
constexpr std::size_t kMostBlocks = 128;  // of b that are held at once: 384 KiB

template <std::size_t Parts>
constexpr std::size_t kLeastWork = Parts == 3 ? std::size_t{3} << 19 : std::size_t{1} << 18;  // multiplications

// Whether the steps come in runs of 32, and the product is large enough to gain from splitting its factors (measured).
template <std::size_t Parts>
bool fits(const Gemm& g) {
  if (g.depth > g.segment && g.segment % kDepth != 0) return false;
  const std::size_t columns = g.panels > 1 ? (g.panels - 1) * g.n + g.last_n : g.n;
  const std::size_t least = Parts == 3 ? 64 : 32;
  return std::min(g.m, columns) >= least && g.depth >= kDepth && g.m * columns * g.depth >= kLeastWork<Parts>;
}

// A product, in blocks of 16 rows of a and 16 columns of b: two by two blocks at a time, over a run of steps. All
// blocks of b are split before the first rows need them, and stay in the L2 cache; those of a before each two rows.
// Sums are finished between the next products. Splitting between products as well took longer: most stored numbers are
// not in the nearest cache then, and tiles' loads wait for them.
//
// `Turned`: b(k, j) lies k floats, within its segment, behind j * b_step.
//
// `Gates`: a factor, the left one a or the right one b, whose numbers count as ones where they are positive and as zeros
// elsewhere. The other factor and the results are multiplied by `Times`.
enum class Gates { none, left, right };
struct Times {
  const float* steps = nullptr;  // a number for each step k
  std::ptrdiff_t steps_segment = 0;
  const float* results = nullptr;  // for each row of c if the gates are a, else for each column
  std::ptrdiff_t results_panel = 0;
};

template <std::size_t Parts, bool Turned = false, Gates Of = Gates::none>
class TiledProduct {
  static_assert(Of != Gates::left || Turned);

 public:
  explicit TiledProduct(const Gemm& gemm, const Times& times = {})
      : g(gemm),
        times_(times),
        rows_((g.m + kLanes - 1) / kLanes),
        in_panel_((g.n + kLanes - 1) / kLanes),
        columns_(g.panels > 1 ? (g.panels - 1) * in_panel_ + (g.last_n + kLanes - 1) / kLanes : in_panel_) {}

  PEARL_AMX_SIMD void run() {
    set_up_tiles(kWholeTiles);
    for (k_ = 0; k_ < g.depth; k_ = end_) {
      end_ = std::min(g.depth, k_ + kMostSteps * kDepth);
      steps_ = (end_ - k_ + kDepth - 1) / kDepth;
      const std::size_t held = std::min(columns_, kMostBlocks / steps_);
      right_ = memory((held + 2) * steps_ * kBlock);
      left_ = right_ + held * steps_ * kBlock;
      for (first_ = 0; first_ < columns_; first_ = last_) {
        last_ = std::min(columns_, first_ + held);
        run_columns();
      }
    }
    give_up_tiles();
  }

 private:
  static constexpr std::size_t kLeft = Of == Gates::left ? 1 : Parts, kRight = Of == Gates::right ? 1 : Parts;

  PEARL_AMX_SIMD void run_columns() {
    for (std::size_t row = 0; row < rows_; row += 2) {
      const bool two_rows = row + 1 < rows_;
      split_left(row, left_);
      if (two_rows) split_left(row + 1, left_ + steps_ * kBlock);
      for (std::size_t column = first_; column < last_;) {
        const std::size_t blocks = blocks_of_columns(column);
        std::uint16_t* const right = right_ + (column - first_) * steps_ * kBlock;
        if (row == 0) {
          split_right(column, right);
          if (blocks == 2) split_right(column + 1, right + steps_ * kBlock);
        }
        zero_sums();
        const auto meanwhile = [&] PEARL_AMX_SIMD __attribute__((always_inline)) {
          if (waiting_ > 0) finish_rows();
        };
        for (std::size_t step = 0; step < steps_; ++step) {
          const std::uint16_t* const lefts[2] = {left_ + step * kBlock, left_ + (steps_ + step) * kBlock};
          const std::uint16_t* const rights[2] = {right + step * kBlock, right + (steps_ + step) * kBlock};
          if (two_rows && blocks == 2)
            multiply<kLeft, kRight, 2, 2>(lefts, rights, meanwhile);
          else if (two_rows)
            multiply<kLeft, kRight, 2, 1>(lefts, rights, meanwhile);
          else if (blocks == 2)
            multiply<kLeft, kRight, 1, 2>(lefts, rights, meanwhile);
          else
            multiply<kLeft, kRight, 1, 1>(lefts, rights, meanwhile);
        }
        finish_all();
        _tile_stored(0, sums_[0], 64);
        wait_for(row, column, sums_[0]);
        if (blocks == 2) {
          _tile_stored(1, sums_[1], 64);
          wait_for(row, column + 1, sums_[1]);
        }
        if (two_rows) {
          _tile_stored(2, sums_[2], 64);
          wait_for(row + 1, column, sums_[2]);
        }
        if (two_rows && blocks == 2) {
          _tile_stored(3, sums_[3], 64);
          wait_for(row + 1, column + 1, sums_[3]);
        }
        column += blocks;
      }
    }
    finish_all();
  }

  PEARL_AMX_INLINE void finish_rows() {
    const Finish& finish = finishes_[waiting_ - 1];
    finish.template do_rows<Of != Gates::none>(g, g.accumulate || k_ > 0, g.relu && end_ == g.depth, finish_row_);
    finish_row_ += kFinishRows;
    if (finish_row_ < finish.rows) return;
    finish_row_ = 0;
    --waiting_;
  }
  PEARL_AMX_SIMD void finish_all() {
    while (waiting_ > 0) finish_rows();
  }

  // A block of 16 columns or rows, in all steps.
  PEARL_AMX_SIMD __attribute__((noinline)) void split_right(std::size_t column, std::uint16_t* to) {
    for (std::size_t k = k_; k < end_; k += kDepth, to += kBlock) split<Of == Gates::right>(of_right(column, k, to));
  }
  PEARL_AMX_SIMD __attribute__((noinline)) void split_left(std::size_t block, std::uint16_t* to) {
    for (std::size_t k = k_; k < end_; k += kDepth, to += kBlock) split<Of == Gates::left>(of_left(block, k, to));
  }
  template <bool IsGates>
  PEARL_AMX_INLINE void split(const Split& split) {
    keep_awake();
    for (std::size_t row = 0; row < kLanes; row += kSplitRows)
      if constexpr (Of == Gates::none)
        split.template do_rows<Parts>(row);
      else if constexpr (IsGates)
        split.template do_rows<1, Taken::gates>(row);
      else
        split.template do_rows<Parts, Of == Gates::right ? Taken::times_lanes : Taken::times_rows>(row);
  }

  // Blocks from `column` on that are multiplied together: of one panel.
  std::size_t blocks_of_columns(std::size_t column) const {
    return column + 1 < last_ && column % in_panel_ + 1 < in_panel_ ? 2 : 1;
  }
  std::size_t width(std::size_t column) const {
    const std::size_t panel = column / in_panel_, first = column % in_panel_ * kLanes;
    return std::min(kLanes, (g.panels > 1 && panel + 1 == g.panels ? g.last_n : g.n) - first);
  }
  std::ptrdiff_t place(std::size_t k, std::ptrdiff_t step, std::ptrdiff_t segment) const {
    if (k < g.segment) return static_cast<std::ptrdiff_t>(k) * step;
    return static_cast<std::ptrdiff_t>(k / g.segment) * segment + static_cast<std::ptrdiff_t>(k % g.segment) * step;
  }

  Split of_right(std::size_t column, std::size_t k, std::uint16_t* to) {
    const std::size_t steps = end_ - k;
    if constexpr (Turned) {
      const float* const from =
          g.b + static_cast<std::ptrdiff_t>(column * kLanes) * g.b_step + place(k, 1, g.b_segment);
      for (std::size_t i = 0; i < 2; ++i) turn(i, from + i * kLanes, g.b_step, width(column), half(steps, i));
      return {turned_[0], turned_[1], kLanes, 0xFFFF, 0xFFFF, half(steps, 0), half(steps, 1), to, times_of(k)};
    }
    const float* b = g.b + static_cast<std::ptrdiff_t>(column / in_panel_) * g.b_panel + column % in_panel_ * kLanes +
                     place(k, g.b_step, g.b_segment);
    const __mmask16 lanes = first_lanes(width(column));
    return {b,
            b + static_cast<std::ptrdiff_t>(kLanes) * g.b_step,
            g.b_step,
            lanes,
            lanes,
            steps,
            steps > kLanes ? steps - kLanes : 0,
            to};
  }
  Split of_left(std::size_t block, std::size_t k, std::uint16_t* to) {
    const std::size_t steps = end_ - k, first = block * kLanes, rows = std::min(kLanes, g.m - first);
    const float* a = g.a + static_cast<std::ptrdiff_t>(first) * g.a_row + place(k, g.a_step, g.a_segment);
    if (g.a_step == 1)
      return {a,    a + kLanes, g.a_row, first_lanes(steps), first_lanes(steps > kLanes ? steps - kLanes : 0),
              rows, rows,       to,      times_of(k)};
    for (std::size_t i = 0; i < 2; ++i)
      turn(i, a + static_cast<std::ptrdiff_t>(i * kLanes) * g.a_step, g.a_step, half(steps, i), rows);
    return {turned_[0], turned_[1], kLanes, 0xFFFF, 0xFFFF, kLanes, kLanes, to, times_of(k)};
  }
  const float* times_of(std::size_t k) const {
    return Of == Gates::none ? nullptr : times_.steps + place(k, 1, times_.steps_segment);
  }
  // The first or second 16 of 32 steps, as far as there are any.
  static std::size_t half(std::size_t steps, std::size_t i) {
    return std::min(kLanes, steps > i * kLanes ? steps - i * kLanes : 0);
  }
  // Half a block whose rows are columns in memory.
  void turn(std::size_t i, const float* from, std::ptrdiff_t row, std::size_t rows, std::size_t columns) {
    if (rows < kLanes || columns < kLanes) std::fill_n(turned_[i], kLanes * kLanes, 0.0f);
    avx512_.transpose(from, rows, columns, static_cast<std::size_t>(row), turned_[i], kLanes);
  }

  void wait_for(std::size_t row_block, std::size_t column, const float* sums) {
    const std::size_t row = row_block * kLanes, in_panel = column % in_panel_ * kLanes;
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(column / in_panel_) * g.c_panel +
                              static_cast<std::ptrdiff_t>(row) * g.c_row + static_cast<std::ptrdiff_t>(in_panel);
    const float* bias = nullptr;
    if (g.bias != nullptr && k_ == 0) bias = g.bias + (g.bias_of_columns ? in_panel : row);
    finishes_[waiting_++] = {
        sums,
        std::min(kLanes, g.m - row),
        first_lanes(width(column)),
        g.c + at,
        bias,
        g.gate != nullptr && end_ == g.depth ? g.gate + at : nullptr,
        Of == Gates::left ? times_.results + row : nullptr,
        Of == Gates::right
            ? times_.results + static_cast<std::ptrdiff_t>(column / in_panel_) * times_.results_panel + in_panel
            : nullptr};
  }

  const Gemm& g;
  const Times times_;
  const LearnerKernels& avx512_ = *avx512_learner_kernels();
  const std::size_t rows_, in_panel_, columns_;  // blocks of 16
  std::size_t k_ = 0, end_ = 0, steps_ = 0, first_ = 0, last_ = 0, waiting_ = 0, finish_row_ = 0;
  Finish finishes_[4];
  std::uint16_t *right_ = nullptr, *left_ = nullptr;
  alignas(64) float sums_[4][kLanes * kLanes];
  alignas(64) float turned_[2][kLanes * kLanes];
};

template <std::size_t Parts>
void gemm(const Gemm& g) {
  if (fits<Parts>(g))
    TiledProduct<Parts>(g).run();
  else
    avx512_learner_kernels()->gemm(g);
}

template <std::size_t Parts>
void turned_gemm(const Gemm& g, float* scratch) {
  if (!fits<Parts>(g) || g.a_step != 1) return avx512_learner_kernels()->turned_gemm(g, scratch);
  TiledProduct<Parts, true>(g).run();
}

// A backward pass through a single output. A slope is the output's weight times a factor of the transition where the
// gate is open, so gates are multiplied instead of slopes.
template <std::size_t Parts>
bool multiply_gates(const Chain& chain) {
  const Gemm& first = chain.first;
  Gemm g = chain.second;
  if (first.m == 0 || first.depth != 1 || !first.is_gated() || !first.is_of_panels(kPanel) || first.a_row != 1 ||
      chain.keeps_first || g.depth % kDepth != 0 || !g.is_of_panels(kPanel) || !fits<Parts>(g))
    return false;
  g.b = first.gate;
  g.b_panel = first.c_panel;
  TiledProduct<Parts, false, Gates::right>(g, {first.a, 0, first.b, first.b_panel}).run();
  if (chain.third.m > 0) gemm<Parts>(chain.third);
  return true;
}

template <std::size_t Parts>
bool chain(const Chain& chain) {
  if (amx::multiply_chain<Parts>(chain)) return chain.first_signs != nullptr || chain.second_signs != nullptr;
  if (!multiply_gates<Parts>(chain)) chain.one_by_one(gemm<Parts>);
  return false;
}

// The gradient of a bias behind a single output: for each of its weights, the factors that its gates let pass.
PEARL_AMX_SIMD void add_up_gates(const LayerGradient& layer) {
  const Gemm& made = layer.made_slopes;
  for (std::size_t o = 0; o < layer.outputs; ++o) {
    const float *gate = made.gate + o * kPanel, *factors = made.b;
    __m512 sum = _mm512_setzero_ps();
    for (std::size_t p = 0; p < layer.panels; ++p, gate += made.c_panel, factors += made.b_panel) {
      const bool whole = p + 1 < layer.panels || layer.last > kLanes;
      sum = _mm512_mask_add_ps(sum, positive(_mm512_loadu_ps(gate)), sum, _mm512_loadu_ps(factors));
      if (whole)
        sum = _mm512_mask_add_ps(sum, positive(_mm512_loadu_ps(gate + kLanes)), sum, _mm512_loadu_ps(factors + kLanes));
    }
    layer.bias[o] = (layer.accumulate ? layer.bias[o] : 0.0f) + made.a[o] * _mm512_reduce_add_ps(sum);
  }
}

template <std::size_t Parts>
void layer_gradient(const LayerGradient& layer) {
  if (layer.outputs == kSquare && layer.inputs == kSquare) return square_gradient<Parts>(layer);
  constexpr auto panel = static_cast<std::ptrdiff_t>(kPanel);
  Gemm g{};
  g.a = layer.made_slopes.gate;
  g.a_row = g.b_step = panel;
  g.a_step = 1;
  g.a_segment = layer.made_slopes.c_panel;
  g.b = layer.x;
  g.b_segment = static_cast<std::ptrdiff_t>(layer.inputs) * panel;
  g.c = layer.weights;
  g.c_row = static_cast<std::ptrdiff_t>(layer.inputs);
  g.m = layer.outputs;
  g.n = layer.inputs;
  g.depth = (layer.panels - 1) * kPanel + layer.last;
  g.segment = kPanel;
  g.accumulate = layer.accumulate;
  TiledProduct<Parts, true, Gates::left>(g, {layer.made_slopes.b, layer.made_slopes.b_panel, layer.made_slopes.a, 0})
      .run();
  if (layer.bias != nullptr) add_up_gates(layer);
}

template <std::size_t Parts>
LearnerKernels table_of(const char* name) {
  LearnerKernels table = *avx512_learner_kernels();
  table.name = name;
  table.sparse = false;
  table.of_sparse = nullptr;
  table.of_bytes = &byte_convolution_kernels();
  table.of_panels = &panel_convolution_kernels(Parts < kParts);
  table.gemm = gemm<Parts>;
  table.turned_gemm = turned_gemm<Parts>;
  table.chain = chain<Parts>;
  table.widest_single = table.widest;  // AVX-512's
  table.unit = table.widest = kSquare;
  table.least_transitions = kPanel + 1;
  table.least_single = kLeastWork<Parts>;
  table.remade = kRemade;
  table.layer_gradient = layer_gradient<Parts>;
  table.single_output = single_output<Parts>;
  return table;
}

}  // namespace

const LearnerKernels* amx_learner_kernels(bool reduced) {
  static const bool present = avx512_learner_kernels() != nullptr && granted();
  if (!present) return nullptr;
  static const LearnerKernels tables[2] = {table_of<3>("amx"), table_of<2>("amx, high")};
  return &tables[reduced ? 1 : 0];
}

}  // namespace pearl::learner

#else

namespace pearl::learner {

const LearnerKernels* amx_learner_kernels(bool) { return nullptr; }

}  // namespace pearl::learner

#endif
