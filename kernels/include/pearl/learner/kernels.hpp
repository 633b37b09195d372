// The learner's hot loops for several instruction sets, chosen once at run time.
//
// Activations are stored feature by feature: a "panel" holds `panel` transitions, and feature f of transition c is at
// f * panel + c. So vectors run over transitions: weights are read where torch keeps them, and layers of any width fill
// the vectors, even output layers of width one or two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pearl/learner/ppo_kernels.hpp"

namespace pearl::learner {

// c(i, j) = [c(i, j)] + [bias(i)] + sum over k of a(i, k) * b(k, j), for i < m, j < n, k < depth; k runs through
// segments (panels, or an image's rows) of `segment` steps each; the last may be shorter. With several panels, a is
// multiplied by each panel's b into its c.
struct Gemm {
  const float* a;
  std::ptrdiff_t a_row, a_step, a_segment;  // floats from row to row, from k to k, from segment to segment
  const float* b;
  std::ptrdiff_t b_step, b_segment;
  float* c;
  std::ptrdiff_t c_row;
  std::size_t m, n, depth, segment;
  const float* bias = nullptr;
  bool bias_of_columns = false;  // bias(j) instead of bias(i)
  bool accumulate = false;
  bool relu = false;
  const float* gate = nullptr;  // same layout as c; c becomes 0 where gate <= 0 (ReLU's derivative)
  std::size_t panels = 1;
  std::ptrdiff_t b_panel = 0, c_panel = 0;  // floats from panel to panel
  std::size_t last_n = 0;                   // the last panel's n, if there are several

  // Whether b and c are panels of so many columns, and rows or steps of a contiguous.
  bool is_of_panels(std::size_t panel) const {
    const auto columns = static_cast<std::ptrdiff_t>(panel);
    return b_step == columns && c_row == columns && (a_step == 1 || a_row == 1) && segment >= depth && !bias_of_columns;
  }
  // Whether it ends in a ReLU, or in a ReLU's derivative, and in nothing else but a bias before the former.
  bool is_rectified() const { return relu && gate == nullptr && !accumulate; }
  bool is_gated() const { return gate != nullptr && bias == nullptr && !relu && !accumulate; }
  bool is_plain() const { return gate == nullptr && !relu && !accumulate; }
  // Columns of all panels.
  std::size_t columns() const { return panels > 1 ? (panels - 1) * n + last_n : n; }
};

// Up to three products of which each takes the result of the one before as b. `first` and `third` are absent if their m
// is 0; the third's result is a plain sum, with a bias or without. A result that another product takes is only stored if
// it is kept, or where a kernel needs its memory.
struct Chain {
  // Worth a chain: a first product of so few terms of each number, a third of so few rows.
  static constexpr std::size_t kMostTerms = 16, kMostRows = 8;
  Gemm first, second, third;
  bool keeps_first, keeps_second;
  std::size_t transitions = 0;  // that count; of the columns behind them, any finite results, and zeros of zeros
  // Unless null, a forward pass may leave the signs of its first or second product's result here, and instead of it if
  // that is not kept; a backward pass then takes them instead of the product's gate. How they lie is the kernels' choice:
  // those of half a panel take a number for each of both results' rows, and begin as many apart.
  std::uint16_t *first_signs = nullptr, *second_signs = nullptr;

  // The products that there are, in their order.
  template <class Multiply>
  void one_by_one(const Multiply& multiply) const {
    for (const Gemm* product : {&first, &second, &third})
      if (product->m > 0) multiply(*product);
  }
};

// The gradients of a linear layer: weights(o, i) = [weights(o, i)] + sum of slopes(o) * x(i), and, unless bias is null,
// bias(o) = [bias(o)] + sum of slopes(o), over the transitions of panels: all of each, but `last` of the last one. Slopes
// of more, up to a half or the whole of it, are zeros, and their x is finite.
struct LayerGradient {
  std::size_t outputs, inputs, panels, last;
  const float *slopes, *x;
  // Unless their m is 0, products that give slopes, which have a gate, and x, a ReLU's result, in place of numbers in
  // memory.
  Gemm made_slopes, made_x;
  float *weights, *bias;
  bool accumulate;
};

// The gradients of a network of two hidden layers with ReLU, of as many numbers each, before a single output, over the
// transitions of panels: all of each, but `last` of the last one. Behind them, slopes are zeros, and x is finite.
struct SingleOutput {
  struct Layer {
    const float *weights, *bias;
    float *weights_gradient, *bias_gradient;
  };
  std::size_t inputs, panels, last;
  const float *x, *slopes;  // the input, and the output's slopes
  const float* hidden;      // the first layer's results, of more inputs than `remade`; else null
  const std::uint16_t *first_signs, *second_signs;  // of the layers' results, as a chain left them
  Layer layers[3];
  bool accumulate;
};

struct AdamStep {
  float beta2, eps;
  float rise1, rise2;  // 1 - beta1, 1 - beta2, rounded once
  float step_size;     // lr / (1 - beta1^t)
  float denominator;   // sqrt(1 - beta2^t)
  float decay;         // Adam: gradient += decay * weight; if `decoupled` (AdamW), weight *= decay, = 1 - lr * decay
  bool decoupled;
};

struct SgdStep {
  float lr, momentum, rise, decay;  // rise: 1 - dampening
  bool nesterov, first;  // first: the momentum buffer starts as the gradient
};

struct LayerNormGradients {
  float* gain;  // null without affine parameters
  float* shift;
  bool accumulate;
};

// A window of `rows` x `columns` positions of a feature map: `channels` floats each, next to each other in a row; rows
// begin `row` floats apart.
struct PoolWindow {
  std::size_t rows, columns, row, channels;
};

// How a normal distribution's sample x of an action becomes an action, tanh(x), with its log density; `low` and `high`
// bound the logarithm of the standard deviation.
struct Squash {
  float low, high;
};

// The slopes of an actor's loss: `slope` is the critics' part, and temperature * share * log density is added.
struct SquashSlopes {
  float low, high, temperature, share;
};

// Quantile regression of a panel's transitions (Dabney et al. 2018, Eq. 10): `count` quantiles of each one's value, at
// tau(i) = (i + 1/2) / count, and `atoms` numbers that are equally likely to be its target; a row of a panel each.
struct QuantileRegression {
  std::size_t count, atoms;
  const float *quantiles, *targets;
  // Huber's losses of u = target(j) - quantile(i), weighted by |tau(i) - [u < 0]|, as a mean over j and a sum over i:
  float* losses;  // (panel)
  float* slopes;  // (count, panel)
};

struct ByteConvolutionKernels;
struct PanelConvolutionKernels;
struct SparseConvolutionKernels;

struct LearnerKernels {
  const char* name;
  std::size_t panel;
  bool sparse;                               // chains and layer_gradient leave out zeros
  std::size_t narrow;                        // inputs of a layer for which narrow_gradients is faster than gemm
  std::size_t unit;                          // of the inputs and outputs of a layer for layer_gradient
  std::size_t widest;                        // the most of each; 0 if there is none
  std::size_t least_transitions;             // for which it is faster
  std::size_t widest_single;                 // the most of each before a single output; 0: `widest`
  std::size_t least_single;                  // least inputs x outputs x transitions of wider ones
  std::size_t remade;                        // most inputs of the layer before of which it makes x again
  const ByteConvolutionKernels* of_bytes;    // null without AMX
  const PanelConvolutionKernels* of_panels;  // the same
  const SparseConvolutionKernels* of_sparse;  // null unless `sparse`
  PpoKernels ppo;

  // Any n; does not touch rows of c and b beyond n.
  void (*gemm)(const Gemm& gemm);
  // The same of one panel, but b(k, j) lies k floats, within its segment, behind j * b_step. `scratch`: turned_floats().
  void (*turned_gemm)(const Gemm& gemm, float* scratch);
  // Returns whether signs were stored, or taken.
  bool (*chain)(const Chain& chain);
  // destination(j, i) = source(i, j), i < rows, j < columns.
  void (*transpose)(const float* source, std::size_t rows, std::size_t columns, std::size_t source_row,
                    float* destination, std::size_t destination_row);

  // Elementwise over `count` floats, a multiple of half a panel; may work in place.
  void (*relu)(const float* x, float* y, std::size_t count);
  void (*tanh)(const float* x, float* y, std::size_t count);
  // dx = [dx] + dy * derivative, given the function's result y.
  void (*relu_backward)(const float* dy, const float* y, float* dx, std::size_t count, bool accumulate);
  void (*tanh_backward)(const float* dy, const float* y, float* dx, std::size_t count, bool accumulate);
  // y = [y] + scale * x.
  void (*scale)(const float* x, float scale, float* y, std::size_t count, bool accumulate);

  // y = scale * x, any count.
  void (*scale_bytes)(const std::uint8_t* x, float scale, float* y, std::size_t count);

  // Over a window: y(channel) = the maximum.
  void (*max_pool)(const PoolWindow& window, const float* x, float* y);
  // dx(position, channel) += dy(channel) at the first position whose x is y(channel).
  void (*max_pool_backward)(const PoolWindow& window, const float* x, const float* y, const float* dy, float* dx);

  // Over the features of one panel of `width` features.
  void (*sum_features)(const float* x, std::size_t width, float* sums);
  // y = x0 + scale * x1, where x1 has one feature.
  void (*add_row)(const float* x0, const float* x1, float scale, float* y, std::size_t width);
  // y = (x - center(f)) / half_range(f).
  void (*to_unit)(const float* x, const float* center, const float* half_range, float* y, std::size_t width);
  // sums(f) = [sums(f)] + sum of x(f) over the transitions of `panels` panels, one behind the other.
  void (*sum_transitions)(const float* x, std::size_t width, std::size_t panels, float* sums, bool accumulate);
  // The gradients of a linear layer with few inputs: weights(o, i) = [weights(o, i)] + sum of dy(o) * x(i), and, unless
  // bias is null, bias(o) = [bias(o)] + sum of dy(o), over the transitions of `panels` panels; all of each, but
  // `last_columns` of the last one. Returns for `inputs` up to `narrow`.
  void (*narrow_gradients)(const float* dy, std::size_t outputs, const float* x, std::size_t inputs, std::size_t panels,
                           std::size_t last_columns, float* weights, float* bias, bool accumulate);
  // Of layers whose inputs and outputs are multiples of `unit`, up to `widest`; if `sparse`, for slopes behind a ReLU.
  // Also of layers up to `widest_single`, if their slopes are to be made of a single output's, and x is in memory.
  void (*layer_gradient)(const LayerGradient& gradient);
  // Of layers of `widest` outputs and up to Chain::kMostTerms inputs, instead of the chain and layer_gradient, for as many
  // transitions as these are; null if there is none.
  void (*single_output)(const SingleOutput& single);
  // One action of a panel's first `columns` transitions, a multiple of half a panel: x = mean + exp(log_std) * noise,
  // unit = tanh(x), log_prob -= what makes it the log density of unit.
  void (*squash)(const Squash& squash, const float* mean, const float* log_std, const float* noise, std::size_t columns,
                 float* unit, float* log_prob);
  // The slopes of mean and log_std, from the critics' slope of unit.
  void (*squash_backward)(const SquashSlopes& settings, const float* slope, const float* unit, const float* log_std,
                          const float* noise, std::size_t columns, float* of_mean, float* of_log_std);
  // statistics: a panel of two features, mean and 1 / standard deviation. gain and shift may be null.
  void (*layer_norm)(const float* x, const float* gain, const float* shift, float eps, std::size_t width, float* y,
                     float* statistics);
  void (*layer_norm_backward)(const float* dy, const float* x, const float* gain, const float* statistics,
                              std::size_t width, float* dx, bool accumulate, const LayerNormGradients& gradients);

  void (*quantile_regression)(const QuantileRegression& regression);
  // Of each transition of a panel, leaves the smallest `kept` of `count` numbers in the first rows, in any order.
  void (*keep_smallest)(float* numbers, std::size_t count, std::size_t kept);

  // Over parameters, any count.
  double (*sum_of_squares)(const float* x, std::size_t count);
  void (*add)(const float* x, float* y, std::size_t count);  // y += x
  // Gradients are multiplied by `factor` first (gradient clipping). max_second: AMSGrad only, else null.
  void (*adam)(const AdamStep& step, float factor, const float* gradients, float* weights, float* first, float* second,
               float* max_second, std::size_t count);
  void (*sgd)(const SgdStep& step, float factor, const float* gradients, float* weights, float* momentum,
              std::size_t count);
  // target += tau * (online - target), as torch.lerp.
  void (*move_toward)(const float* online, float tau, float* target, std::size_t count);
};

// Rows of a turned b are an odd number of cache lines long: with a power of two they would share few cache sets.
constexpr std::size_t turned_row(std::size_t columns) { return 16 * ((columns + 15) / 16 | 1); }
constexpr std::size_t turned_floats(std::size_t columns, std::size_t steps) { return turned_row(columns) * steps; }

// The table in use: the variant that PEARL_ISA (plain, avx2, avx512, amx) names, else the fastest that this machine has;
// its products in float32, or where PEARL_MATMUL is "high" and the variant can, with 16 bits of each factor. Throws
// ConfigurationError for other values, and if this machine lacks the variant that PEARL_ISA names.
const LearnerKernels& learner_kernels();
// Names of the variants that this machine has, plainest first.
std::vector<std::string> learner_kernel_variants();
// Sets the variant of learners made from now on. Throws ConfigurationError for a name that is not among the variants.
void select_learner_kernels(const std::string& name);
// Sets the precision of learners made from now on: "highest" or "high". Throws ConfigurationError for others.
void select_matmul_precision(const std::string& name);

const LearnerKernels& plain_learner_kernels();
// x86-64 only; null if this machine lacks the instruction set.
const LearnerKernels* avx2_learner_kernels();
const LearnerKernels* avx512_learner_kernels();
const LearnerKernels* amx_learner_kernels(bool reduced);  // null too if the system grants no tiles

}  // namespace pearl::learner
