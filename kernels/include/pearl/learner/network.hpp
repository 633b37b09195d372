// A network as operations on panels of transitions (kernels.hpp): forward, and backward to the gradients of its
// parameters and of its input. The parameters belong to the caller: one vector, in which each operation has its offsets.
// So one Network serves an online and a target network, and gradients have the layout of the parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/ensemble.hpp"
#include "pearl/learner/image_trunk.hpp"
#include "pearl/learner/kernels.hpp"
#include "pearl/learner/op.hpp"

namespace pearl::learner {

// Transitions whose activations are held at once: enough to amortise a pass over the weights' gradients and splitting the
// weights for products, few enough for the activations to stay in the L2 cache.
inline constexpr std::size_t kGroup = 256;

// Loads `count` rows of `width` floats into a panel and zeroes its other transitions.
void load_panel(const LearnerKernels& kernels, const float* rows, std::size_t width, std::size_t count, float* panel);

class Network;

// One thread's memory to process up to `panels` panels at a time. Not shared between threads.
class Workspace {
 public:
  // Uses the memory of `lender`, which then loses its numbers, if that has the same widths but for the output's, which
  // may be smaller here: so what is zero in it stays zero.
  Workspace(const Network& network, std::size_t panels, bool gradients, const Workspace* lender = nullptr);
  Workspace(Workspace&&) = default;

  std::size_t panels() const { return panels_; }
  float* value(std::size_t value, std::size_t panel) { return at(values_, value, panel); }
  float* gradient(std::size_t value, std::size_t panel) { return at(gradients_, value, panel); }
  // Zeroes all values: needed before a batch of another size.
  void clear();
  // What the next forward passes drop, from the first panel on; by default nothing.
  DropoutPass dropout;

 private:
  friend class Network;
  bool lends_to(const Workspace& other) const;
  float* at(float* array, std::size_t value, std::size_t panel) {
    return array + offsets_[value] * panels_ + panel * (offsets_[value + 1] - offsets_[value]);
  }

  std::size_t panels_;
  std::vector<std::size_t> offsets_;  // of each value, in floats of one panel
  AlignedArray<float> own_;
  std::size_t floats_ = 0, cleared_ = 0;
  float *values_ = nullptr, *gradients_ = nullptr, *statistics_ = nullptr, *rows_ = nullptr, *masks_ = nullptr;
  float* converted_ = nullptr;  // a panel's inputs, of bytes
  std::vector<std::uint16_t> signs_;
  bool has_first_signs_ = false, has_second_signs_ = false;  // of hidden layers
  bool lacks_second_ = false;                                // instead of the values
  bool of_single_output_ = false;                            // whose gradients are made of the signs
  std::optional<ImageWorkspace> images_;
};

class Network {
 public:
  // Throws LearnerError naming the operation that does not fit. `parameters` is the length of the parameter vector.
  // Inputs `of_bytes` are std::uint8_t, and are scaled to [0, 1]. Operations up to a flatten work on images.
  Network(std::size_t input_width, const std::vector<Op>& ops, std::size_t parameters, bool of_bytes = false);

  std::size_t input_width() const { return input_width_; }
  std::size_t input_bytes() const { return input_width_ * (of_bytes_ ? 1 : sizeof(float)); }
  bool takes_bytes() const { return of_bytes_; }
  // Whether value 0 is the input itself: not of images, nor of bytes.
  bool takes_vectors() const { return !of_bytes_ && !trunk_; }
  // Throws LearnerError that says `whose` unless the network takes vectors.
  void require_vectors(const char* whose) const;
  // Transitions that are worth a worker of its own, and panels that a workspace should hold at once.
  std::size_t grain() const { return trunk_ ? 1 : kernels_.panel / 2; }
  std::size_t group_panels() const;
  std::size_t output_width() const { return widths_.back(); }
  std::size_t output() const { return widths_.size() - 1; }  // the output's value
  std::size_t parameters() const { return parameters_; }
  const LearnerKernels& kernels() const { return kernels_; }
  // Whether an operation here and one of `other` have a weight or bias in common.
  bool shares_parameters(const Network& other) const;

  // Loads transitions `rows` (count, input_width), floats or bytes, into a panel and zeroes its other transitions. A
  // network of images reads them later, in forward() and backward().
  void load(const void* rows, std::size_t count, Workspace& workspace, std::size_t panel) const;
  // Computes panels 0..panels-1, which hold `count` transitions: all columns of each, but `last_columns` of the last one,
  // half or all of it. Results beyond the transitions may be any finite numbers. `judges`: backward() will be called
  // without gradients of parameters.
  void forward(const float* parameters, Workspace& workspace, std::size_t panels, std::size_t count,
               std::size_t last_columns, bool judges = false) const;
  // Starts from gradient(output()) of panels 0..panels-1, which hold `count` transitions, then zeros. `gradients` may be
  // null; with `accumulate` they are added to. The gradients of the last `inputs` features of the input are left in
  // gradient(0), which only a network that takes vectors can. `last_columns` of the last panel are computed, all of the
  // others.
  void backward(const float* parameters, float* gradients, Workspace& workspace, std::size_t panels, std::size_t count,
                std::size_t last_columns, bool accumulate, std::size_t inputs) const;
  // The `columns` argument for a batch of `count` transitions.
  std::size_t columns(std::size_t count) const {
    return count <= kernels_.panel / 2 ? kernels_.panel / 2 : kernels_.panel;
  }
  // The columns of the last panel of `rows` transitions that are computed in groups of `group`. With several groups, they
  // are all of it: sums over a panel take every column, and one that is left out would keep an earlier group's values.
  std::size_t last_columns(std::size_t rows, std::size_t group) const {
    return rows > group ? kernels_.panel : columns((rows - 1) % kernels_.panel + 1);
  }
  // The columns of panel `p` of `panels` that are computed.
  std::size_t columns_of(std::size_t p, std::size_t panels, std::size_t last_columns) const {
    return p + 1 == panels ? last_columns : kernels_.panel;
  }

 private:
  friend class Workspace;
  enum class Activation : std::uint8_t { none, relu, tanh };

  // An operation with the activation that follows it, and what backward needs about its neighbours.
  struct Step {
    Op op;
    std::size_t in[2], out;
    Activation activation = Activation::none;
    bool adds[2] = {false, false};  // adds to its input's gradient: a later step has already written it
    bool adds_weights = false;      // adds to its parameters' gradients: a later step uses them too
    bool gates_input = false;       // applies the derivative of its input's ReLU in the same pass
    bool gated = false;             // the user of its result has applied its ReLU's derivative
    bool follows = false;           // linear, and alone takes the result of the step before, which is linear too
    std::size_t statistics = 0;     // LayerNorm: which
    std::uint32_t layer = 0;        // dropout: which
    std::size_t mask = 0;           // dropout: features of the masks before its own
  };

  // Numbers of the signs of half a panel: of a network of three layers, two results.
  std::size_t signs() const { return steps_.size() == 3 ? widths_[1] + widths_[2] : 1; }
  std::vector<Op> split(const std::vector<Op>& ops);
  void check(const Op& op, std::size_t index, const std::vector<std::size_t>& widths) const;
  void plan(const std::vector<Op>& ops);
  // Computes the linear operation `at` and those that follow it in a chain of products. Returns how many.
  std::size_t multiply(std::size_t at, const float* parameters, Workspace& workspace, std::size_t panels,
                       std::size_t count, std::size_t last_columns, bool judges) const;
  Gemm product(const Step& step, const float* parameters, Workspace& workspace, std::size_t panels,
               std::size_t last_columns) const;
  void compute(const Step& step, const float* parameters, Workspace& workspace, std::size_t panel,
               std::size_t columns) const;
  void set_panels(Gemm& gemm, std::size_t from, std::size_t to, std::size_t panels, std::size_t last_columns) const;
  void tanh_of(const float* x, float* y, std::size_t width, std::size_t columns) const;
  // Whether the next step alone takes the result of step `at`, is linear, applies its ReLU's derivative, and has at most
  // so many outputs.
  bool is_before_few(std::size_t at, std::size_t most) const;
  // Whether layer_gradient takes the weights' gradient of step `at`.
  bool has_layer_gradient(std::size_t at, std::size_t count) const;
  // Whether it also makes the slopes, which the next step alone gives, with few outputs; and its input, which the step
  // before makes of few numbers.
  bool makes_slopes(std::size_t at, std::size_t count) const;
  bool makes_input(std::size_t at, std::size_t count) const;
  // Whether the kernels make all gradients together, of the signs of two hidden layers before a single output.
  bool is_of_single_output(std::size_t count) const;
  void single_output_gradients(const float* parameters, float* gradients, Workspace& workspace, std::size_t panels,
                               std::size_t count, bool accumulate) const;
  void weights_gradient(std::size_t at, const float* parameters, float* gradients, Workspace& workspace,
                        std::size_t panels, std::size_t count, std::size_t last_columns, bool accumulate) const;
  // The gradients of the inputs of the linear operation `at` and of those that it follows. Returns of how many.
  std::size_t inputs_gradients(std::size_t at, const float* parameters, Workspace& workspace, std::size_t panels,
                               std::size_t count, std::size_t last_columns, bool keeps, std::size_t inputs) const;
  // Of an operation that takes the network's input, the gradients of its last `inputs` features.
  Gemm input_gradient(const Step& step, const float* parameters, Workspace& workspace, std::size_t panels,
                      std::size_t last_columns, std::size_t inputs) const;

  const LearnerKernels& kernels_;
  std::size_t input_width_, parameters_;
  bool of_bytes_;
  std::size_t first_ = 0;            // number of the first operation on panels
  std::optional<ImageTrunk> trunk_;  // gives value 0
  std::vector<std::size_t> widths_;  // of the values that are stored
  std::vector<Step> steps_;
  std::size_t statistics_ = 0;
  std::uint32_t dropouts_ = 0;
  std::size_t mask_width_ = 0;    // features of all dropout operations
  std::size_t widest_input_ = 0;  // of a linear operation
};

}  // namespace pearl::learner
