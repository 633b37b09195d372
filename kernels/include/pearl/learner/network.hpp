// A network as operations on panels of transitions (kernels.hpp): forward, and backward to the gradients of its
// parameters and of its input. The parameters themselves are the caller's: one vector, where each operation knows its
// offsets, so that one Network serves an online and a target network, and gradients are laid out as parameters are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/learner/kernels.hpp"

namespace pearl::learner {

inline constexpr std::ptrdiff_t kNone = -1;

// Transitions whose activations are held at once: enough that a pass over the weights' gradients is worth it, few
// enough that the activations stay in the second-level cache.
inline constexpr std::size_t kGroup = 128;

// `count` rows of `width` floats into a panel; transitions that the panel has beyond become 0.
void load_panel(const LearnerKernels& kernels, const float* rows, std::size_t width, std::size_t count, float* panel);

enum class OpKind { linear, relu, tanh, layer_norm, add, subtract, mean };
OpKind op_kind(const std::string& name);  // throws LearnerError for an unknown one

// Value 0 is the network's input, value i + 1 what operation i computes; the last one is the network's output.
struct Op {
  OpKind kind;
  std::ptrdiff_t inputs[2];  // values; the second is kNone but for add and subtract
  std::size_t width;         // features of the result
  std::ptrdiff_t weight = kNone, bias = kNone;  // offsets of parameters, (out, in) and (out,) as torch has them
  float eps = 0.0f;
};

class Network;

// What one thread needs to take up to `panels` panels at a time through a network. Not shared between threads.
class Workspace {
 public:
  Workspace(const Network& network, std::size_t panels, bool gradients);

  std::size_t panels() const { return panels_; }
  float* value(std::size_t value, std::size_t panel) { return at(values_, value, panel); }
  float* gradient(std::size_t value, std::size_t panel) { return at(gradients_, value, panel); }
  // Forgets what other transitions left behind: needed before a batch of another size.
  void clear();

 private:
  friend class Network;
  float* at(AlignedArray<float>& array, std::size_t value, std::size_t panel) {
    return array.data() + offsets_[value] * panels_ + panel * (offsets_[value + 1] - offsets_[value]);
  }

  std::size_t panels_;
  std::vector<std::size_t> offsets_;  // of each value, in floats of one panel
  AlignedArray<float> values_, gradients_, statistics_, rows_;
};

class Network {
 public:
  // Throws LearnerError naming the operation that does not fit. `parameters` is the length of the parameter vector.
  Network(std::size_t input_width, const std::vector<Op>& ops, std::size_t parameters);

  std::size_t input_width() const { return widths_.front(); }
  std::size_t output_width() const { return widths_.back(); }
  std::size_t output() const { return widths_.size() - 1; }  // the output's value
  std::size_t parameters() const { return parameters_; }
  const LearnerKernels& kernels() const { return kernels_; }

  // Transitions `rows` (count, input_width) into a panel of value 0; those that the panel has beyond become 0.
  void load(const float* rows, std::size_t count, Workspace& workspace, std::size_t panel) const;
  // Vectors cover `columns` of the panel: half or all of it.
  void forward(const float* parameters, Workspace& workspace, std::size_t panel, std::size_t columns) const;
  // From gradient(output()) of panels 0..panels-1, which hold `count` transitions and 0 beyond. `gradients` may be
  // null; those of other groups of panels are added to if `accumulate`. The input's gradient is left in gradient(0)
  // if `of_input`.
  void backward(const float* parameters, float* gradients, Workspace& workspace, std::size_t panels, std::size_t count,
                std::size_t columns, bool accumulate, bool of_input) const;
  // Vectors needed for a batch of `count` taken in as many panels as it takes.
  std::size_t columns(std::size_t count) const {
    return count <= kernels_.panel / 2 ? kernels_.panel / 2 : kernels_.panel;
  }

 private:
  friend class Workspace;
  enum class Activation : std::uint8_t { none, relu, tanh };

  // An operation with the activation that follows it, and what backward needs to know of its neighbours.
  struct Step {
    Op op;
    std::size_t in[2], out;
    Activation activation = Activation::none;
    bool adds[2] = {false, false};  // to the gradient of its input, which a later step has already written
    bool adds_weights = false;      // to the gradients of parameters that a later step uses too
    bool gates_input = false;       // its input's ReLU is differentiated in the same pass
    bool gated = false;             // whoever used its result has done so
    std::size_t statistics = 0;     // LayerNorm: which
  };

  void check(const Op& op, std::size_t index, const std::vector<std::size_t>& widths) const;
  void plan(const std::vector<Op>& ops);
  void linear_backward(const Step& step, const float* parameters, float* gradients, Workspace& workspace,
                       std::size_t panels, std::size_t count, std::size_t columns, bool accumulate,
                       bool of_input) const;

  const LearnerKernels& kernels_;
  std::size_t parameters_;
  std::vector<std::size_t> widths_;  // of the values that are kept
  std::vector<Step> steps_;
  std::size_t statistics_ = 0;
  std::size_t widest_input_ = 0;  // of a linear operation
};

}  // namespace pearl::learner
