// The operations of a network, as plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pearl::learner {

inline constexpr std::ptrdiff_t kNone = -1;

enum class OpKind : std::uint8_t { linear, relu, tanh, layer_norm, add, subtract, mean, dropout, conv2d, max_pool2d, flatten };
OpKind op_kind(const std::string& name);  // throws LearnerError for an unknown one
const char* op_name(OpKind kind);

// The input of a convolution or pooling, and how its window moves over it: vertically, then horizontally.
struct Window {
  std::size_t channels, height, width;  // of its input
  std::size_t kernel[2], stride[2], padding[2];
};

// Value 0 is the network's input, value i + 1 what operation i computes; the last one is the network's output.
struct Op {
  OpKind kind;
  std::ptrdiff_t inputs[2];  // values; only add and subtract have a second, else kNone
  std::size_t width;         // numbers of the result
  // Offsets of parameters as torch has them: (out, in) and (out,); of convolutions (out, in, height, width) and (out,).
  std::ptrdiff_t weight = kNone, bias = kNone;
  float eps = 0.0f;  // of dropout: the share of numbers that it drops
  Window window{};  // of convolutions and poolings

  std::size_t input_count() const { return kind == OpKind::add || kind == OpKind::subtract ? 2 : 1; }
};

// Throws LearnerError that names operation `index`.
[[noreturn]] void refuse(const Op& op, std::size_t index, const std::string& what);
// Refuses parameters `offset` to `offset + count` that lie outside a vector of `parameters`.
void require_parameters(const Op& op, std::size_t index, std::ptrdiff_t offset, std::size_t count,
                        std::size_t parameters);

}  // namespace pearl::learner
