#include "pearl/normal.hpp"

#include <algorithm>

#include "pearl/philox.hpp"

namespace pearl {

void fill_normal(std::uint64_t seed, std::uint64_t step, std::uint32_t draw, std::size_t count, float* out) {
  constexpr std::size_t kBlocks = 16;  // processed together: loops of a fixed length are vectorised
  const auto step_low = static_cast<std::uint32_t>(step), step_high = static_cast<std::uint32_t>(step >> 32);
  std::uint32_t words[4][kBlocks];
  float normals[4 * kBlocks];
  for (std::size_t done = 0; done < count; done += 4 * kBlocks) {
    const auto block = static_cast<std::uint32_t>(done / 4);
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      const PhiloxWords found = philox4x32({block + b, draw, step_low, step_high}, seed);
      for (std::size_t k = 0; k < 4; ++k) words[k][b] = found[k];
    }
    for (std::size_t b = 0; b < kBlocks; ++b) {
      const NormalPair first = normal_pair(words[0][b], words[1][b]), second = normal_pair(words[2][b], words[3][b]);
      normals[4 * b] = first.first;
      normals[4 * b + 1] = first.second;
      normals[4 * b + 2] = second.first;
      normals[4 * b + 3] = second.second;
    }
    std::copy_n(normals, std::min(4 * kBlocks, count - done), out + done);
  }
}

}  // namespace pearl
