// The first convolution of images of bytes whose channels are frames of a game: pixels that do not move are left out.
//
// Each frame but the first becomes its difference from the frame before, and the first its difference from the byte
// that it has most of. Where few of those are not zero, the rest need no product. A frame is the sum of the differences
// up to it, so a difference is multiplied by the sum of the weights of its own frame and all later ones. A weight's
// gradient is the sum of the gradients for the differences up to its frame. Differences of bytes lose no digit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pearl/aligned.hpp"
#include "pearl/learner/sparse_convolution.hpp"

namespace pearl::learner {

class FrameConvolution {
 public:
  // One thread's memory: the differences of one image at a time.
  class Workspace {
   public:
    Workspace() = default;
    Workspace(const FrameConvolution& convolution, bool gradients);

    // The image that was read may have changed.
    void forget() { image_ = nullptr; }

   private:
    friend class FrameConvolution;
    FrameDifferences differences() const { return {numbers_.data(), bits_.data(), base_}; }

    const void* image_ = nullptr;
    bool few_ = false;
    std::int16_t base_ = 0;
    AlignedArray<std::int16_t> numbers_, planes_;
    AlignedArray<std::uint16_t> bits_;
    AlignedArray<float> weights_, gradients_;
    AlignedArray<float> of_base_;  // what a base of 1 adds to each channel of the result
    AlignedArray<float> bias_;     // with what the base adds
  };

  // `convolution`, of images of so many frames and bytes in each, each byte times `scale`.
  FrameConvolution(const FrameConvolutionKernels& kernels, const ByteConvolution& convolution, std::size_t frames,
                   std::size_t positions, float scale);

  // Weights (runs, run, out), for convolve().
  void pack(const float* weights, Workspace& workspace) const;
  // Reads an image (frames, positions), unless it was read last. Returns whether at most half of its differences are
  // not zero: only then is this faster.
  bool reads(const void* image, Workspace& workspace) const;
  // Of the image that was read last; `bias` may be null.
  void convolve(const float* bias, bool relu, Workspace& workspace, float* result) const;
  // The gradients of many images are added up in between, and then added to those of the weights.
  void begin_gradients(Workspace& workspace) const;
  void add_gradients(const float* slopes, Workspace& workspace) const;
  void end_gradients(Workspace& workspace, float* gradients) const;

 private:
  std::size_t numbers() const { return convolution_.runs * convolution_.run; }  // under a kernel

  const FrameConvolutionKernels& kernels_;
  const ByteConvolution convolution_;
  const std::size_t frames_, positions_;
  const float scale_;
};

}  // namespace pearl::learner
