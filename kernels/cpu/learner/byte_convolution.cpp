#include "pearl/learner/byte_convolution.hpp"

#include "amx.hpp"

#if defined(PEARL_AMX)

#include <algorithm>
#include <cstring>

namespace pearl::learner {
namespace {

using namespace amx;

bool fits(const ByteConvolution& c) {
  return c.run % kDepth == 0 && c.channels % kLanes == 0 && c.height > 0 && c.width > 0;
}

PEARL_AMX_SIMD void widen(const std::uint8_t* bytes, std::size_t count, std::uint16_t* numbers) {
  // The upper half of a float is its bfloat16 number, here without a remainder.
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m512i whole = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(whole)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + i), _mm512_cvtepi32_epi16(upper));
  }
  for (; i < count; ++i) {
    const auto number = static_cast<float>(bytes[i]);
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    numbers[i] = static_cast<std::uint16_t>(bits >> 16);
  }
}

// For each two neighbouring numbers under the kernel: pairs of 16 channels.
PEARL_AMX_SIMD void pack(const ByteConvolution& c, const float* weights, std::uint16_t* parts) {
  std::uint16_t* to = parts;
  for (std::size_t first = 0; first < c.channels; first += kLanes)
    for (std::size_t k = 0; k < c.runs * c.run; k += kDepth, to += kParts * kTileNumbers)
      for (std::size_t pair = 0; pair < kDepth / 2; ++pair) {
        const float* even = weights + (k + 2 * pair) * c.channels + first;
        split<kParts>(_mm512_loadu_ps(even), _mm512_loadu_ps(even + c.channels), to + pair * 2 * kLanes);
      }
}

// One tile of sums, `rows` x 16 channels, scaled and moved by the bias.
PEARL_AMX_SIMD inline void finish(const float* sums, std::size_t rows, float scale, const float* bias, bool relu,
                              float* result, std::size_t channels) {
  const __m512 by = _mm512_set1_ps(scale), none = _mm512_setzero_ps();
  const __m512 shift = bias == nullptr ? none : _mm512_loadu_ps(bias);
  for (std::size_t row = 0; row < rows; ++row) {
    __m512 value = _mm512_add_ps(_mm512_mul_ps(by, _mm512_loadu_ps(sums + row * kLanes)), shift);
    if (relu) value = _mm512_max_ps(none, value);  // a NaN stays a NaN
    _mm512_storeu_ps(result + row * channels, value);
  }
}

PEARL_AMX_SIMD void convolve(const ByteConvolution& c, const std::uint16_t* image, const std::uint16_t* parts,
                             float scale, const float* bias, bool relu, float* result) {
  // Tiles of equally many positions; the last one may overlap the one before it.
  const std::size_t tiles = (c.width + kLanes - 1) / kLanes, rows = (c.width + tiles - 1) / tiles;
  const std::size_t last_position = c.width - rows, last_channel = c.channels - kLanes;
  const std::size_t blocks = c.runs * c.run / kDepth, in_run = c.run / kDepth;
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.bytes[tile] = 64;
    shapes.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : kLanes);  // 0 to 3 sums, 4 and 5 of the image
  }
  set_up_tiles(shapes);
  alignas(64) float sums[4][kLanes * kLanes];
  const auto step = static_cast<long>(c.step * sizeof(std::uint16_t));
  for (std::size_t y = 0; y < c.height; ++y)
    for (std::size_t channel = 0; channel < c.channels; channel += 2 * kLanes) {
      const std::size_t channels[2] = {channel, std::min(channel + kLanes, last_channel)};
      const std::uint16_t* of[2];
      for (int i = 0; i < 2; ++i) of[i] = parts + channels[i] / kLanes * blocks * kParts * kTileNumbers;
      for (std::size_t x = 0; x < c.width; x += 2 * rows) {
        const std::size_t positions[2] = {std::min(x, last_position), std::min(x + rows, last_position)};
        const std::uint16_t* from = image + y * c.row_step;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (std::size_t block = 0; block < blocks; ++block) {
          const std::uint16_t* run = from + block / in_run * c.image_row + block % in_run * kDepth;
          _tile_loadd(4, run + positions[0] * c.step, step);
          _tile_loadd(5, run + positions[1] * c.step, step);
          for (std::size_t part = 0; part < kParts; ++part) {
            const std::size_t at = (block * kParts + part) * kTileNumbers;
            _tile_loadd(6, of[0] + at, 64);
            _tile_loadd(7, of[1] + at, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int i = 0; i < 4; ++i) {
          const std::size_t first = channels[i % 2];
          finish(sums[i], rows, scale, bias == nullptr ? nullptr : bias + first, relu,
                 result + y * c.result_row + positions[i / 2] * c.channels + first, c.channels);
        }
      }
    }
  give_up_tiles();
}

}  // namespace

const ByteConvolutionKernels& byte_convolution_kernels() {
  static constexpr ByteConvolutionKernels kernels = {fits, widen, pack, convolve};
  return kernels;
}

}  // namespace pearl::learner

#endif
