// Planes of channels as positions whose channels lie next to each other.
#pragma once

#include <algorithm>
#include <cstddef>

namespace pearl::learner {

template <std::size_t Channels, class T>
[[gnu::always_inline]] inline void interleave(const T* planes, std::size_t positions, T* mixed) {
  for (std::size_t i = 0; i < positions; ++i)
    for (std::size_t c = 0; c < Channels; ++c) mixed[i * Channels + c] = planes[c * positions + i];
}

// (channels, positions) to (positions, channels), with its caller's instructions.
template <class T>
[[gnu::always_inline]] inline void interleave(const T* planes, std::size_t channels, std::size_t positions, T* mixed) {
  if (channels == 1) return static_cast<void>(std::copy_n(planes, positions, mixed));
  if (channels == 3) return interleave<3>(planes, positions, mixed);
  if (channels == 4) return interleave<4>(planes, positions, mixed);
  for (std::size_t c = 0; c < channels; ++c)
    for (std::size_t i = 0; i < positions; ++i) mixed[i * channels + c] = planes[c * positions + i];
}

}  // namespace pearl::learner
