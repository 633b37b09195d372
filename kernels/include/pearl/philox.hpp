// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). It is counter-based: lane k of
// call c is the same number on every device, in whatever order lanes are computed.
#pragma once

#include <array>
#include <cstdint>

#include "pearl/device/portable.hpp"

namespace pearl {

using PhiloxWords = std::array<std::uint32_t, 4>;

PEARL_FN PhiloxWords philox4x32(PhiloxWords counter, std::uint64_t seed) {
  std::uint32_t key0 = static_cast<std::uint32_t>(seed);
  std::uint32_t key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The four words that lanes 2 * pair and 2 * pair + 1 of one call share: two words each.
PEARL_FN PhiloxWords philox_lane_pair(std::uint64_t seed, std::uint64_t call, std::uint64_t pair) {
  return philox4x32({static_cast<std::uint32_t>(pair), static_cast<std::uint32_t>(pair >> 32),
                     static_cast<std::uint32_t>(call), static_cast<std::uint32_t>(call >> 32)},
                    seed);
}

PEARL_FN std::uint64_t even_lane(const PhiloxWords& words) { return words[0] | std::uint64_t{words[1]} << 32; }
PEARL_FN std::uint64_t odd_lane(const PhiloxWords& words) { return words[2] | std::uint64_t{words[3]} << 32; }

// High half of the 128-bit product.
PEARL_FN std::uint64_t mulhi64(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#elif defined(__SYCL_DEVICE_ONLY__)  // devices have no 128-bit integers
  const std::uint64_t a_low = a & 0xFFFFFFFFu, a_high = a >> 32, b_low = b & 0xFFFFFFFFu, b_high = b >> 32;
  const std::uint64_t middle = a_high * b_low + ((a_low * b_low) >> 32);
  const std::uint64_t other = a_low * b_high + (middle & 0xFFFFFFFFu);
  return a_high * b_high + (middle >> 32) + (other >> 32);
#else
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// floor(2^64 / parts); 0 for one part.
PEARL_FN std::uint64_t stratum_width(std::uint64_t parts) { return (0 - parts) / parts + 1; }

// A number uniform in [0, 2^64) as it is (width 0), or moved into slice `at` of equal slices of this width.
PEARL_FN std::uint64_t in_slice(std::uint64_t at, std::uint64_t random, std::uint64_t width) {
  return width == 0 ? random : at * width + mulhi64(random, width);
}

// The number of lane `at` of one call. `width`: 0, or stratum_width(lanes) for stratified lanes.
PEARL_FN std::uint64_t uniform_at(std::uint64_t seed, std::uint64_t call, std::uint64_t at, std::uint64_t width) {
  const PhiloxWords words = philox_lane_pair(seed, call, at >> 1);
  return in_slice(at, at & 1 ? odd_lane(words) : even_lane(words), width);
}

// Calls visit(lane, uniform_at(seed, call, lane, width)) for `count` lanes from `first` on, which is even.
template <class Visit>
void for_lanes(std::uint64_t seed, std::uint64_t call, std::uint64_t width, std::uint64_t first, std::uint64_t count,
               Visit visit) {
  const std::uint64_t end = first + count;
  for (std::uint64_t lane = first; lane < end; lane += 2) {
    const PhiloxWords words = philox_lane_pair(seed, call, lane / 2);
    visit(lane, in_slice(lane, even_lane(words), width));
    if (lane + 1 < end) visit(lane + 1, in_slice(lane + 1, odd_lane(words), width));
  }
}

}  // namespace pearl
