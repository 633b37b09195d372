// Convolutions of a panel's images together in AMX, with the precision of the kernels' products (kernels_amx.cpp).
//
// A row of one image's result is too short for AMX: its tiles hold 16 rows, and these are 16 images here. Each position
// of the input becomes a tile of 16 images and 32 channels, split into parts once for all positions of the result that
// need it; for the weights' gradient, a tile of 16 channels and 32 images, whose products add up over the images. So
// every tile is full, and no patch is copied. Few images fill few rows: then AVX-512 is faster, image by image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/learner/byte_convolution.hpp"

namespace pearl::learner {

// The place where a row (or column) of the result meets one of the input, and the kernel's row (or column) there.
struct Meeting {
  std::ptrdiff_t place;  // of the input; below 0: outside, where zeros are
  std::size_t tap;       // of the kernel
};

// Feature maps of a panel's images: channels next to each other.
template <class T>
struct PanelMaps {
  T* first;                // the first position of the first image
  std::size_t image, row;  // floats from image to image, and from row to row
};

// A convolution, or the gradient of one's input: a convolution of the result's gradient.
struct PanelConvolution {
  std::size_t in, out;    // channels: multiples of 32
  std::size_t width;      // of the input
  std::size_t kernel[2];  // of the weights (row, column, in, out)
  std::size_t step;       // columns of the result that far apart meet the same columns of the kernel
  std::vector<std::vector<Meeting>> rows, columns;  // of each of the result; of rows, those inside alone

  // bfloat16 numbers that the weights become, at most.
  std::size_t parts() const { return 3 * kernel[0] * kernel[1] * in * out; }
};

struct PanelConvolutionKernels {
  // Weights to their parts.
  void (*pack)(const PanelConvolution& convolution, const float* weights, std::uint16_t* parts);
  // result = [max(0,] convolution + bias [+ result] [)], 0 where gate <= 0. bias and gate may be null; the gate has the
  // result's layout.
  void (*convolve)(const PanelConvolution& convolution, std::size_t images, PanelMaps<const float> input,
                   const std::uint16_t* parts, const float* bias, bool relu, bool accumulate, const float* gate,
                   PanelMaps<float> result);
  // Adds to gradients (row, column, in, out) of the weights. The memory of 32 images must be there.
  void (*add_gradients)(const PanelConvolution& convolution, std::size_t images, PanelMaps<const float> input,
                        PanelMaps<const float> slopes, float* gradients);
  // The same of a convolution of bytes (images, channels, height, width), each times `scale`.
  bool (*fits_bytes)(const ByteConvolution& convolution);
  void (*add_byte_gradients)(const ByteConvolution& convolution, std::size_t images, const std::uint8_t* bytes,
                             std::size_t channels, std::size_t height, std::size_t width, float scale,
                             PanelMaps<const float> slopes, float* gradients);
};

// Images of a panel for which these are worth it, and images that a forward pass takes at once, so that their maps stay
// in the L2 cache.
inline constexpr std::size_t kLeastImages = 12, kForwardImages = 16;
// Those of the kernels "amx" (LearnerKernels), `reduced` to 16 bits or not; only where the compiler knows AMX.
const PanelConvolutionKernels& panel_convolution_kernels(bool reduced);

}  // namespace pearl::learner
