// The first convolution of an image of bytes in AMX, whose products are of bfloat16 numbers and whose sums are float32.
//
// No digit is lost: bfloat16 holds the whole numbers from 0 to 255, and a float32 weight is the sum of three bfloat16
// numbers. So each weight takes three products, five times as fast together as one in AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pearl::learner {

// A convolution without padding. Numbers of the image lie row by row, channels last.
struct ByteConvolution {
  std::size_t image_row;            // numbers of one of the image's rows
  std::size_t row_step, step;       // numbers from one position of the result to that below it, and to the next
  std::size_t run, runs;            // numbers in one row of the kernel, and such rows
  std::size_t height, width;        // of the result
  std::size_t channels, result_row;  // of the result: floats of a position, and from row to row

  std::size_t parts() const { return 3 * runs * run * channels; }  // bfloat16 numbers that the weights become
};

struct ByteConvolutionKernels {
  // Whether the convolution has sizes that these kernels take.
  bool (*fits)(const ByteConvolution& convolution);
  // Bytes to bfloat16: `count` whole numbers.
  void (*widen)(const std::uint8_t* bytes, std::size_t count, std::uint16_t* numbers);
  // Weights (runs, run, channels) to their parts.
  void (*pack)(const ByteConvolution& convolution, const float* weights, std::uint16_t* parts);
  // result = [max(0,] scale * convolution + bias [)]; bias may be null.
  void (*convolve)(const ByteConvolution& convolution, const std::uint16_t* image, const std::uint16_t* parts,
                   float scale, const float* bias, bool relu, float* result);
};

// Those of the kernels "amx" (LearnerKernels); only where the compiler knows AMX.
const ByteConvolutionKernels& byte_convolution_kernels();

}  // namespace pearl::learner
