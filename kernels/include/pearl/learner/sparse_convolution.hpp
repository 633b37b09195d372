// Convolutions of several images that leave out the zeros of a ReLU (kernels/cpu/learner/sparse_body.hpp says how).
//
// Channels lie next to each other, so under a row of the kernel lies a run of numbers, and all that a number of the run
// is multiplied by lies in a row too: the results' channels. Their rows are added up where the number is not zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/learner/panel_convolution.hpp"

namespace pearl::learner {

// A convolution, or the gradient of one's input: a convolution of the result's gradient, where each column stands for a
// stride's number of the input's columns.
struct SparseConvolution {
  std::size_t run, runs;   // numbers under a row of the kernel, and such rows
  std::ptrdiff_t start;    // where the first column's runs begin, from a row's first position on; margins are zeros
  std::size_t step;        // numbers from one column's runs to the next one's
  std::size_t width, out;  // columns of the result, and numbers of each
  std::vector<std::vector<Meeting>> rows;  // of each of the result: rows of the input, and of the kernel in order
};

// The differences of an image's frames, from a byte and from one to the next: of (position, frame).
struct FrameDifferences {
  static constexpr std::size_t kWord = 16;
  // Numbers of a word, and words to read at once.
  static std::size_t words(std::size_t numbers) { return numbers / kWord + 4; }

  const std::int16_t* numbers;
  const std::uint16_t* bits;  // which are not zero: 16 in a word
  std::int16_t base;          // the byte
};

// Convolutions of such differences (frame_convolution.hpp). Weights and gradients are (runs, run, out).
struct FrameConvolutionKernels {
  bool (*fits)(const ByteConvolution& convolution);
  // From an image (frames, positions); `planes` has as many numbers. Returns how many differences are not zero.
  std::size_t (*differ)(const std::uint8_t* image, std::size_t frames, std::size_t positions, std::int16_t base,
                        std::int16_t* planes, std::int16_t* numbers, std::uint16_t* bits);
  // result = [max(0,] convolution + bias [)].
  void (*convolve)(const ByteConvolution& convolution, const FrameDifferences& differences, const float* weights,
                   const float* bias, bool relu, float* result);
  // Adds to gradients; to those of the first frame's weights also what the base gives.
  void (*add_gradients)(const ByteConvolution& convolution, const FrameDifferences& differences, std::size_t frames,
                        const float* slopes, float* gradients);
};

// Weights and their gradients are (runs, run, out). An infinite weight of a zero counts as zero.
struct SparseConvolutionKernels {
  // Whether the convolution has sizes that convolve(), or add_gradients(), takes.
  bool (*fits)(const SparseConvolution& convolution);
  bool (*fits_gradients)(const SparseConvolution& convolution);
  // result = [max(0,] convolution + bias [)], 0 where gate <= 0. bias and gate may be null; the gate has the result's
  // layout. Returns false, and has done nothing, if too few numbers of the first images are zeros.
  bool (*convolve)(const SparseConvolution& convolution, std::size_t images, PanelMaps<const float> input,
                   const float* weights, const float* bias, bool relu, const float* gate, PanelMaps<float> result);
  // Adds to the gradients of the weights. `slopes` are those of the result, many of which should be zeros.
  void (*add_gradients)(const SparseConvolution& convolution, std::size_t images, PanelMaps<const float> input,
                        PanelMaps<const float> slopes, float* gradients);
  FrameConvolutionKernels frames;
};

// Images that these take at once, so that their maps stay in the L2 cache.
inline constexpr std::size_t kSparseImages = 8;

}  // namespace pearl::learner
