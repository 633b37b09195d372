// The random order of an epoch's rows: Fisher-Yates (Durstenfeld 1964) by Philox, the same on every device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "pearl/philox.hpp"

namespace pearl {

// Shuffles in place: for i = count - 1 down to 1, swaps items i and mulhi64(uniform_at(seed, call, i, 0), i + 1).
template <class T>
void shuffle(std::uint64_t seed, std::uint64_t call, T* items, std::size_t count) {
  PhiloxWords words{};
  for (std::size_t i = count; i-- > 1;) {
    const bool odd = i % 2 == 1;
    if (odd || i + 1 == count) words = philox_lane_pair(seed, call, i / 2);  // which lane i - 1 shares
    const std::uint64_t random = odd ? odd_lane(words) : even_lane(words);
    std::swap(items[i], items[mulhi64(random, i + 1)]);
  }
}

}  // namespace pearl
