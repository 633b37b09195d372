// The gradients of a network of two hidden layers of 64, with ReLU, before a single output, in AMX.
//
// The forward pass leaves the signs of the hidden layers' numbers (amx_chain.cpp). With gates g1 and g2, which are 1 where
// those are positive and else 0, weights W2 and biases b2 of the second layer, weights w of the output, and its slope d in
// a transition, the gradients are these sums over transitions:
//
//   first layer:   (d * t * g1) times the input, with t = g2 times (W2 times w)
//   second layer:  w * S, with S = g2 times (d * h1), and biases w * s, with s = sum of d * g2
//   output:        W2 . S + b2 * s, which is the sum of d * h2, as h2 = g2 * (W2 times h1 + b2)
//
// So the second layer's numbers are not needed, and storing them would take longer. The tiles of t have transitions as
// rows and the first layer's features as columns. So W2 is split as it lies in memory, and the first layer's gradients
// are added up as vectors of features, without sums over lanes. amx_gradient.cpp computes S.
#include "amx_blocks.hpp"

#if defined(PEARL_AMX)

namespace pearl::learner::amx {
namespace {

constexpr std::size_t kGroups = kSquare / kLanes, kSteps = kSquare / kDepth;
constexpr std::size_t kTurns = 4;               // of the vector units in the products of 32 steps
constexpr std::size_t kMade = kLanes / kTurns;  // transitions whose gates are made in a turn
constexpr std::size_t kFinished = 2 * kMade;    // whose sums are finished, of one of four groups of features
constexpr std::size_t kSigns = 2 * kSquare;     // of half a panel, of both layers

// As in chains: numbers that are stored while tiles are loaded have a quarter of each page for themselves.
struct Held {
  using Tile = std::uint16_t[kTileNumbers];
  struct Page {
    Tile stored, weights[kParts];
  };
  static constexpr std::size_t kInputs = kSteps + kGroups, kSlopes = kInputs + 1, kFirst = kSlopes + 1;
  Page pages[kFirst + Chain::kMostTerms / 4 + 1];

  std::uint16_t* weights(std::size_t step, std::size_t group) { return pages[step * kGroups + group].weights[0]; }
  std::uint16_t* gates(std::size_t step) { return pages[step].stored; }
  float* sums(std::size_t group) { return floats(kSteps + group); }
  // Of a block of transitions: the output's slopes, and the inputs times these.
  float* slopes() { return floats(kSlopes); }
  float* inputs() { return floats(kInputs); }
  // Sums of the slopes that the second layer's gates let pass.
  float* second() { return floats(kSlopes) + kLanes; }
  // Sums of an input's 64 gradients; those of the bias are behind the last input's.
  float* first(std::size_t input) { return floats(kFirst + input / 4) + input % 4 * kSquare; }

 private:
  float* floats(std::size_t page) { return reinterpret_cast<float*>(pages[page].stored); }
};
constexpr std::size_t kPage = sizeof(Held::Page) / sizeof(std::uint16_t);
static_assert(sizeof(Held) >= kSteps * kGroups * sizeof(Held::Page));

// A bit each, of as many features as a vector has.
struct alignas(64) Bits {
  std::uint16_t of[kLanes][kDepth];
};
constexpr Bits kBits = [] {
  Bits bits{};
  for (std::size_t bit = 0; bit < kLanes; ++bit)
    for (std::uint16_t& number : bits.of[bit]) number = static_cast<std::uint16_t>(1u << bit);
  return bits;
}();

// The gradients of the first layer, and the sums s of slopes. `Terms` inputs; 0: any number.
template <std::size_t Parts, std::size_t Terms>
class FirstGradients {
 public:
  explicit FirstGradients(const SingleOutput& single) : s_(single), held_(pages<Held>()) {}

  // Leaves the tiles set up: the second layer's gradient follows.
  PEARL_AMX_SIMD void run(float* second_sums) {
    const std::size_t blocks = 2 * s_.panels - (s_.last > kLanes ? 0 : 1);
    set_up_tiles(kWholeTiles);
    keep_awake();
    for (std::size_t input = 0; input <= terms(); ++input) std::fill_n(held_.first(input), kSquare, 0.0f);
    std::fill_n(held_.second(), kSquare, 0.0f);
    split_weights(0);
    keep_awake();
    make_all();
    for (std::size_t block = 0; block < blocks; ++block) {
      const bool starts = block == 0, makes = block + 1 < blocks;
      if (!starts) take_inputs(block - 1);
      zero_sums();
#pragma GCC unroll 1
      for (std::size_t step = 0; step < kSteps; ++step) {
        if (starts && step > 0) split_weights(step);
        multiply_step(step, [&](std::size_t turn) PEARL_AMX_SIMD __attribute__((always_inline)) {
          if (makes) make(block + 1, step, turn);
          if (!starts) finish(block - 1, step * kTurns + turn);
        });
      }
      store_sums([&](std::size_t i) { return held_.sums(i); });
    }
    take_inputs(blocks - 1);
#pragma GCC unroll 1
    for (std::size_t turn = 0; turn < kSteps * kTurns; ++turn) finish(blocks - 1, turn);
    keep_awake();
    give(second_sums);
    keep_awake();
  }

 private:
  std::size_t terms() const { return Terms > 0 ? Terms : s_.inputs; }
  const float* slopes(std::size_t block) const { return s_.slopes + block * kLanes; }

  // 32 of the second layer's outputs, as steps: those that follow each other are a pair.
  PEARL_AMX_SIMD __attribute__((noinline)) void split_weights(std::size_t step) const {
    const SingleOutput::Layer& layer = s_.layers[1];
    const float *row = layer.weights + step * kDepth * kSquare, *times = s_.layers[2].weights + step * kDepth;
    for (std::size_t pair = 0; pair < kLanes; ++pair, row += 2 * kSquare, times += 2)
#pragma GCC unroll 4
      for (std::size_t group = 0; group < kGroups; ++group)
        split<Parts, false>(_mm512_mul_ps(_mm512_loadu_ps(row + group * kLanes), _mm512_set1_ps(times[0])),
                            _mm512_mul_ps(_mm512_loadu_ps(row + kSquare + group * kLanes), _mm512_set1_ps(times[1])),
                            held_.weights(step, group) + pair * kDepth);
  }

  // The products of 32 steps: after every three of them (of 16 bits: two) `meanwhile` gives the vector units a turn.
  template <class Meanwhile>
  PEARL_AMX_INLINE void multiply_step(std::size_t step, const Meanwhile& meanwhile) const {
    const std::uint16_t* const weights = held_.weights(step, 0);
    finish_stores();
    _tile_loadd(4, held_.gates(step), 64);
    // Small products first.
    if constexpr (Parts == 3) {
      multiply<0, 2>(weights);
      multiply<1, 2>(weights);
      multiply<2, 2>(weights);
      meanwhile(0);
      multiply<3, 2>(weights);
      multiply<0, 1>(weights);
      multiply<1, 1>(weights);
      meanwhile(1);
      multiply<2, 1>(weights);
      multiply<3, 1>(weights);
    } else {
      multiply<0, 1>(weights);
      multiply<1, 1>(weights);
      meanwhile(0);
      multiply<2, 1>(weights);
      multiply<3, 1>(weights);
      meanwhile(1);
    }
    multiply<0, 0>(weights);
    if constexpr (Parts == 3) meanwhile(2);
    multiply<1, 0>(weights);
    if constexpr (Parts == 2) meanwhile(2);
    multiply<2, 0>(weights);
    multiply<3, 0>(weights);
    meanwhile(3);
  }
  template <int Group, std::size_t Part>
  PEARL_AMX_INLINE static void multiply(const std::uint16_t* weights) {
    const std::uint16_t* const from = weights + Group * kPage + Part * kTileNumbers;
    if constexpr (Group % 2 == 0) {
      _tile_loadd(5, from, 64);
      multiply_tiles<Group, 4, 5>();
    } else {
      _tile_loadd(6, from, 64);
      multiply_tiles<Group, 4, 6>();
    }
  }

  // Gates of 32 of the second layer's outputs: a row for each of a few transitions.
  PEARL_AMX_INLINE void make(std::size_t block, std::size_t step, std::size_t turn) const {
    const __m512i signs = _mm512_loadu_si512(s_.second_signs + block * kSigns + step * kDepth);
    const float* const from = slopes(block);
    float* const sums = held_.second() + step * kDepth;
    __m512 lower = _mm512_load_ps(sums), upper = _mm512_load_ps(sums + kLanes);
#pragma GCC unroll 4
    for (std::size_t i = turn * kMade; i < (turn + 1) * kMade; ++i) {
      const __mmask32 passes = _mm512_test_epi16_mask(signs, _mm512_load_si512(kBits.of[i]));
      _mm512_store_si512(held_.gates(step) + i * kDepth, _mm512_maskz_mov_epi16(passes, _mm512_set1_epi16(0x3F80)));
      const __m512 slope = _mm512_set1_ps(from[i]);
      lower = _mm512_mask_add_ps(lower, static_cast<__mmask16>(passes), lower, slope);
      upper = _mm512_mask_add_ps(upper, static_cast<__mmask16>(passes >> kLanes), upper, slope);
    }
    _mm512_store_ps(sums, lower);
    _mm512_store_ps(sums + kLanes, upper);
  }
  // For the first block.
  PEARL_AMX_SIMD __attribute__((noinline)) void make_all() const {
#pragma GCC unroll 1
    for (std::size_t turn = 0; turn < kSteps * kTurns; ++turn) make(0, turn / kTurns, turn % kTurns);
  }

  PEARL_AMX_INLINE void take_inputs(std::size_t block) const {
    const float* x = s_.x + block / 2 * terms() * kPanel + block % 2 * kLanes;
    const __m512 of_block = _mm512_loadu_ps(slopes(block));
    _mm512_store_ps(held_.slopes(), of_block);
#pragma GCC unroll 8
    for (std::size_t input = 0; input < terms(); ++input, x += kPanel)
      _mm512_store_ps(held_.inputs() + input * kLanes, _mm512_mul_ps(of_block, _mm512_loadu_ps(x)));
  }
  // The gradients of a group of features from a few transitions.
  PEARL_AMX_INLINE void finish(std::size_t block, std::size_t turn) const {
    const std::size_t group = turn / 2, from = turn % 2 * kFinished;
    const auto* const row = reinterpret_cast<const __m256i*>(s_.first_signs + block * kSigns + group * kLanes);
    const __m256i signs = _mm256_loadu_si256(row);
    __m512 sums[kFinished];
    __mmask16 passes[kFinished];
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kFinished; ++i) {
      sums[i] = _mm512_load_ps(held_.sums(group) + (from + i) * kLanes);
      passes[i] =
          _mm256_test_epi16_mask(signs, _mm256_load_si256(reinterpret_cast<const __m256i*>(kBits.of[from + i])));
    }
    const auto add = [&](const float* times, float* to) PEARL_AMX_SIMD __attribute__((always_inline)) {
      __m512 total = _mm512_load_ps(to);
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kFinished; ++i)
        total = _mm512_mask3_fmadd_ps(sums[i], _mm512_set1_ps(times[from + i]), total, passes[i]);
      _mm512_store_ps(to, total);
    };
#pragma GCC unroll 8
    for (std::size_t input = 0; input < terms(); ++input)
      add(held_.inputs() + input * kLanes, held_.first(input) + group * kLanes);
    add(held_.slopes(), held_.first(terms()) + group * kLanes);
  }

  void give(float* second_sums) const {
    const SingleOutput::Layer& layer = s_.layers[0];
    const std::size_t inputs = terms();
    for (std::size_t i = 0; i <= inputs; ++i) {
      const float* const sums = held_.first(i);
      float* to = i < inputs ? layer.weights_gradient + i : layer.bias_gradient;
      const std::size_t row = i < inputs ? inputs : 1;
      for (std::size_t o = 0; o < kSquare; ++o, to += row) *to = (s_.accumulate ? *to : 0.0f) + sums[o];
    }
    std::copy_n(held_.second(), kSquare, second_sums);
  }

  const SingleOutput& s_;
  Held& held_;
};

}  // namespace

template <std::size_t Parts>
void single_output(const SingleOutput& single) {
  alignas(64) float sums[kSquare], products[kSquare];
  if (single.inputs == 3)
    FirstGradients<Parts, 3>(single).run(sums);
  else if (single.inputs == 4)
    FirstGradients<Parts, 4>(single).run(sums);
  else
    FirstGradients<Parts, 0>(single).run(sums);

  const SingleOutput::Layer &first = single.layers[0], &second = single.layers[1], &third = single.layers[2];
  LayerGradient layer{};
  layer.outputs = layer.inputs = kSquare;
  layer.panels = single.panels;
  layer.last = single.last;
  layer.x = single.hidden;
  layer.made_slopes.a = third.weights;
  layer.made_slopes.b = single.slopes;
  layer.made_slopes.b_panel = kPanel;
  layer.made_slopes.m = kSquare;
  layer.made_slopes.depth = 1;
  if (single.hidden == nullptr) {
    layer.made_x.a = first.weights;
    layer.made_x.a_row = static_cast<std::ptrdiff_t>(single.inputs);
    layer.made_x.b = single.x;
    layer.made_x.b_panel = static_cast<std::ptrdiff_t>(single.inputs * kPanel);
    layer.made_x.bias = first.bias;
    layer.made_x.m = kSquare;
    layer.made_x.depth = single.inputs;
  }
  layer.weights = second.weights_gradient;
  layer.accumulate = single.accumulate;
  gradient_of_signs<Parts>(layer, {single.second_signs, second.weights, products});

  const auto give = [&](float& to, float sum) { to = (single.accumulate ? to : 0.0f) + sum; };
  for (std::size_t o = 0; o < kSquare; ++o) {
    give(second.bias_gradient[o], third.weights[o] * sums[o]);
    give(third.weights_gradient[o], products[o] + second.bias[o] * sums[o]);
  }
  float totals[kLanes] = {}, total = 0.0f;
  for (std::size_t first = 0; first < (single.panels - 1) * kPanel + single.last; first += kLanes)
    for (std::size_t i = 0; i < kLanes; ++i) totals[i] += single.slopes[first + i];
  for (const float sum : totals) total += sum;
  give(*third.bias_gradient, total);
}

template void single_output<2>(const SingleOutput&);
template void single_output<3>(const SingleOutput&);

}  // namespace pearl::learner::amx

#endif
