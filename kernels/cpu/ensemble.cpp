#include "pearl/ensemble.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "pearl/philox.hpp"

namespace pearl {
namespace {

// philox4x32 of `count` counters, counter i from words[0][i] to words[3][i], in loops that compilers can vectorise.
template <std::size_t count>
void philox_blocks(std::uint32_t (&words)[4][count], std::uint64_t seed) {
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * words[0][i];
      const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * words[2][i];
      words[0][i] = static_cast<std::uint32_t>(product1 >> 32) ^ words[1][i] ^ key0;
      words[1][i] = static_cast<std::uint32_t>(product1);
      words[2][i] = static_cast<std::uint32_t>(product0 >> 32) ^ words[3][i] ^ key1;
      words[3][i] = static_cast<std::uint32_t>(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

}  // namespace

void choose_critics(std::uint64_t seed, std::uint64_t step, std::size_t critics, std::size_t chosen,
                    std::uint32_t* out) {
  std::vector<std::uint32_t> left(critics);
  std::iota(left.begin(), left.end(), 0u);
  const auto step_low = static_cast<std::uint32_t>(step), step_high = static_cast<std::uint32_t>(step >> 32);
  PhiloxWords words{};
  for (std::size_t k = 0; k < chosen; ++k) {
    if (k % 4 == 0) words = philox4x32({static_cast<std::uint32_t>(k / 4), 2u, step_low, step_high}, seed);
    const std::size_t at = k + static_cast<std::size_t>((std::uint64_t{words[k % 4]} * (critics - k)) >> 32);
    std::swap(left[k], left[at]);
    out[k] = left[k];
  }
}

void fill_dropout(const DropoutPass& pass, std::uint32_t layer, double rate, std::size_t rows, std::size_t width,
                  float* out, std::size_t row_stride, std::size_t feature_stride) {
  constexpr std::size_t kRows = 16, kFeatures = 16, kCounters = 4 * kFeatures;  // of a block, processed together
  constexpr std::uint64_t kKey = 0x9D39247E33776D41u;  // other words than those of the noise
  const auto threshold = static_cast<std::uint32_t>(rate * 4294967296.0);
  const auto factor = static_cast<float>(1.0 / (1.0 - rate));
  const std::uint32_t draw = (pass.draw | layer) ^ static_cast<std::uint32_t>(pass.step >> 32) << 24;
  const std::size_t end = pass.first_row + rows;
  std::uint32_t words[4][kCounters];
  float factors[4][kCounters];
  for (std::size_t block = pass.first_row / kRows; block * kRows < end; ++block) {
    const std::size_t top = block * kRows, begin = std::max(top, pass.first_row), stop = std::min(top + kRows, end);
    for (std::size_t first = 0; first < width; first += kFeatures) {
      for (std::uint32_t i = 0; i < kCounters; ++i) {
        words[0][i] = static_cast<std::uint32_t>(4 * block) + i % 4;
        words[1][i] = static_cast<std::uint32_t>(first) + i / 4;
        words[2][i] = static_cast<std::uint32_t>(pass.step);
        words[3][i] = draw;
      }
      philox_blocks<kCounters>(words, pass.seed ^ kKey);
      for (std::size_t k = 0; k < 4; ++k)
        for (std::size_t i = 0; i < kCounters; ++i) factors[k][i] = words[k][i] < threshold ? 0.0f : factor;
      const std::size_t features = std::min(kFeatures, width - first);
      for (std::size_t f = 0; f < features; ++f) {
        float* to = out + (first + f) * feature_stride;
        if (row_stride == 1 && stop - begin == kRows) {
          for (std::size_t k = 0; k < 4; ++k)
            std::copy_n(factors[k] + 4 * f, 4, to + (top - pass.first_row) + 4 * k);
          continue;
        }
        for (std::size_t row = begin; row < stop; ++row) {
          const std::size_t at = row - top;
          to[(row - pass.first_row) * row_stride] = factors[at / 4][4 * f + at % 4];
        }
      }
    }
  }
}

}  // namespace pearl
