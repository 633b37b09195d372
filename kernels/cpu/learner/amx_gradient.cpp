// The gradient of a layer's weights in AMX, for layers of 64 inputs and outputs.
#include "amx_blocks.hpp"
#include "avx512_turn.hpp"

#if defined(PEARL_AMX)

namespace pearl::learner::amx {
namespace {

constexpr std::size_t kWidth = 64, kBlocks = kWidth / kLanes, kPanel = 2 * kLanes, kUnit = 4, kLeastPanels = 2;

template <std::size_t Parts>
class SquareGradient {
 public:
  SquareGradient(const float* slopes, const float* values, std::size_t panels, std::size_t last_columns, float* gradient)
      : slopes_(slopes), values_(values), panels_(panels), last_columns_(last_columns), gradient_(gradient) {}

  PEARL_AMX_SIMD void run(bool accumulate) {
    _tile_loadconfig(&kWholeTiles);
    left_ = memory(2 * kBlocks * kBlock);
    right_ = left_ + kBlocks * kBlock;
    for (std::size_t unit = 0; unit < kUnits; ++unit) {
      split_left(0, 0, unit);
      split_right(0, 0, unit);
    }
    // Pairs of blocks of one panel at a time are in the L1 cache: each takes the place of one that was used last.
    for (std::size_t panel = 0; panel < panels_; ++panel) {
      const std::size_t last = panel % 2 == 0 ? 0 : 2, other = 2 - last, next = panel + 1;
      const bool adds = accumulate || panel > 0;
      multiply_pairs(0, last, adds, Todo::right, panel, other);
      multiply_pairs(0, other, adds, Todo::left, panel, 2);
      multiply_pairs(2, other, adds, next < panels_ ? Todo::left : Todo::none, next, 0);
      multiply_pairs(2, last, adds, next < panels_ ? Todo::right : Todo::none, next, other);
    }
    _tile_release();
  }

 private:
  enum class Todo { none, left, right };
  static constexpr std::size_t kUnits = 2 * kLanes / kUnit;  // of a pair of blocks

  std::uint16_t* left(std::size_t block) const { return left_ + block * kBlock; }
  std::uint16_t* right(std::size_t block) const { return right_ + block * kBlock; }
  bool whole(std::size_t panel) const { return panel + 1 < panels_ || last_columns_ > kLanes; }

  PEARL_AMX_INLINE void split_left(std::size_t panel, std::size_t block, std::size_t unit) const {
    block += unit / kUnit;
    const std::size_t row = unit % kUnit * kUnit;
    const __m512 none = _mm512_setzero_ps();
    const float* from = slopes_ + (panel * kWidth + block * kLanes + row) * kPanel;
    std::uint16_t* const to = left(block) + row * kDepth;
    const bool all = whole(panel);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i)
      split<Parts>(_mm512_loadu_ps(from + i * kPanel), all ? _mm512_loadu_ps(from + i * kPanel + kLanes) : none,
                   to + i * kDepth);
  }
  PEARL_AMX_INLINE void split_right(std::size_t panel, std::size_t block, std::size_t unit) const {
    block += unit / kUnit;
    const std::size_t row = unit % kUnit * kUnit;
    const float* from = values_ + (panel * kWidth + block * kLanes) * kPanel + row;
    std::uint16_t* const to = right(block) + row * kDepth;
    __m512 even[4], odd[4];
    turn_columns(from, kPanel, even);
    if (whole(panel))
      turn_columns(from + kLanes, kPanel, odd);
    else
      odd[0] = odd[1] = odd[2] = odd[3] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kUnit; ++i) split<Parts, false>(even[i], odd[i], to + i * kDepth);
  }

  // Two by two blocks of sums, while a pair of blocks is split.
  PEARL_AMX_SIMD __attribute__((noinline)) void multiply_pairs(std::size_t row, std::size_t column, bool adds, Todo todo,
                                                               std::size_t panel, std::size_t pair) {
    float* const c = gradient_ + row * kLanes * kWidth + column * kLanes;
    float* const below = c + kLanes * kWidth;
    constexpr std::size_t kBytes = kWidth * sizeof(float);
    const std::uint16_t* const lefts[] = {left(row), left(row + 1)};
    const std::uint16_t* const rights[] = {right(column), right(column + 1)};
    if (adds) {
      _tile_loadd(0, c, kBytes);
      _tile_loadd(1, c + kLanes, kBytes);
      _tile_loadd(2, below, kBytes);
      _tile_loadd(3, below + kLanes, kBytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    // The last turn is left out: what is split is multiplied next.
    constexpr std::size_t kTurns = Parts == 3 ? 5 : 2;
    std::size_t turns = 0;
    const auto meanwhile = [&] PEARL_AMX_SIMD __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (std::size_t unit = 0; unit < kUnits; ++unit) {
        if (unit * kTurns / kUnits != turns) continue;
        if (todo == Todo::left) split_left(panel, pair, unit);
        if (todo == Todo::right) split_right(panel, pair, unit);
      }
      ++turns;
    };
    asm volatile("" ::: "memory");
    multiply<Parts, Parts, 2, 2>(lefts, rights, spare_, meanwhile);
    _tile_stored(0, c, kBytes);
    _tile_stored(1, c + kLanes, kBytes);
    _tile_stored(2, below, kBytes);
    _tile_stored(3, below + kLanes, kBytes);
  }

  const float *slopes_, *values_;
  const std::size_t panels_, last_columns_;
  float* gradient_;
  std::uint16_t *left_ = nullptr, *right_ = nullptr;
  alignas(64) float spare_[kLanes * kLanes];
};

}  // namespace

template <std::size_t Parts>
bool square_gradient(const float* slopes, std::size_t outputs, const float* values, std::size_t inputs,
                     std::size_t panels, std::size_t last_columns, float* gradient, bool accumulate) {
  if (outputs != kWidth || inputs != kWidth || panels < kLeastPanels) return false;
  SquareGradient<Parts>(slopes, values, panels, last_columns, gradient).run(accumulate);
  return true;
}

template bool square_gradient<2>(const float*, std::size_t, const float*, std::size_t, std::size_t, std::size_t, float*,
                                 bool);
template bool square_gradient<3>(const float*, std::size_t, const float*, std::size_t, std::size_t, std::size_t, float*,
                                 bool);

}  // namespace pearl::learner::amx

#endif
