// Random numbers for C++ tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using Floats = std::vector<float>;

inline Floats random_floats(std::size_t count, std::uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Floats values(count);
  for (float& value : values) value = normal(generator);
  return values;
}
