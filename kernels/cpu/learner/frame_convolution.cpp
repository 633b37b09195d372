#include "pearl/learner/frame_convolution.hpp"

#include <algorithm>

namespace pearl::learner {
namespace {

// The most frequent of some bytes spread over a frame.
std::uint8_t most_frequent(const std::uint8_t* frame, std::size_t positions) {
  constexpr std::size_t kSamples = 64;
  std::uint8_t samples[kSamples];
  for (std::size_t i = 0; i < kSamples; ++i) samples[i] = frame[(2 * i + 1) * positions / (2 * kSamples)];
  std::sort(samples, samples + kSamples);
  std::uint8_t found = samples[0];
  std::ptrdiff_t most = 0;
  for (const std::uint8_t *at = samples, *end = samples + kSamples; at != end;) {
    const std::uint8_t* const next = std::upper_bound(at, end, *at);
    if (next - at > most) found = *at;
    most = std::max(most, next - at);
    at = next;
  }
  return found;
}

}  // namespace

FrameConvolution::Workspace::Workspace(const FrameConvolution& convolution, bool gradients)
    : numbers_(convolution.frames_ * convolution.positions_),
      planes_(numbers_.size()),
      bits_(FrameDifferences::words(numbers_.size())),
      weights_(convolution.numbers() * convolution.convolution_.channels),
      gradients_(gradients ? weights_.size() : 0),
      of_base_(convolution.convolution_.channels),
      bias_(of_base_.size()) {}

FrameConvolution::FrameConvolution(const FrameConvolutionKernels& kernels, const ByteConvolution& convolution,
                                   std::size_t frames, std::size_t positions, float scale)
    : kernels_(kernels), convolution_(convolution), frames_(frames), positions_(positions), scale_(scale) {}

void FrameConvolution::pack(const float* weights, Workspace& workspace) const {
  const std::size_t out = convolution_.channels;
  float* const of_base = workspace.of_base_.data();
  std::fill_n(of_base, out, 0.0f);
  for (std::size_t first = 0; first < numbers(); first += frames_) {
    const float* from = weights + (first + frames_) * out;
    float* to = workspace.weights_.data() + (first + frames_) * out;
    for (std::size_t frame = frames_; frame-- > 0;) {
      from -= out;
      to -= out;
      for (std::size_t o = 0; o < out; ++o) to[o] = scale_ * from[o] + (frame + 1 < frames_ ? to[o + out] : 0.0f);
    }
    for (std::size_t o = 0; o < out; ++o) of_base[o] += to[o];
  }
}

bool FrameConvolution::reads(const void* image, Workspace& workspace) const {
  if (workspace.image_ == image) return workspace.few_;
  const auto* const bytes = static_cast<const std::uint8_t*>(image);
  workspace.image_ = image;
  workspace.base_ = most_frequent(bytes, positions_);
  const std::size_t found = kernels_.differ(bytes, frames_, positions_, workspace.base_, workspace.planes_.data(),
                                            workspace.numbers_.data(), workspace.bits_.data());
  return workspace.few_ = 2 * found <= frames_ * positions_;
}

void FrameConvolution::convolve(const float* bias, bool relu, Workspace& workspace, float* result) const {
  const auto base = static_cast<float>(workspace.base_);
  for (std::size_t o = 0; o < convolution_.channels; ++o)
    workspace.bias_[o] = (bias == nullptr ? 0.0f : bias[o]) + base * workspace.of_base_[o];
  kernels_.convolve(convolution_, workspace.differences(), workspace.weights_.data(), workspace.bias_.data(), relu,
                    result);
}

void FrameConvolution::begin_gradients(Workspace& workspace) const {
  std::fill_n(workspace.gradients_.data(), workspace.gradients_.size(), 0.0f);
}

void FrameConvolution::add_gradients(const float* slopes, Workspace& workspace) const {
  kernels_.add_gradients(convolution_, workspace.differences(), frames_, slopes, workspace.gradients_.data());
}

void FrameConvolution::end_gradients(Workspace& workspace, float* gradients) const {
  const std::size_t out = convolution_.channels;
  float* from = workspace.gradients_.data();
  for (std::size_t number = 0; number < numbers(); ++number, from += out, gradients += out)
    for (std::size_t o = 0; o < out; ++o) {
      if (number % frames_ != 0) from[o] += from[o - out];
      gradients[o] += scale_ * from[o];
    }
}

}  // namespace pearl::learner
