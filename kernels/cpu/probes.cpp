#include "pearl/probes.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/philox.hpp"

namespace pearl {
namespace {

double seconds_of(const std::chrono::steady_clock::time_point& start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class T>
void keep(T const& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

}  // namespace

double copy_bandwidth_gbps(std::size_t nbytes, int repeats) {
  AlignedArray<char> source(nbytes);
  AlignedArray<char> target(nbytes);
  std::memset(source.data(), 1, nbytes);
  std::memset(target.data(), 2, nbytes);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::memcpy(target.data(), source.data(), nbytes);
    keep(target.data());
    best = std::min(best, seconds_of(start));
  }
  return 2.0 * static_cast<double>(nbytes) / best * 1e-9;
}

double random_access_ns(std::size_t nbytes, std::size_t steps) {
  // One cycle through all lines in random order (Sattolo), so that each load's address is the last load's value.
  constexpr std::size_t kWords = kCacheLine / sizeof(std::uint64_t);
  const std::size_t lines = std::max<std::size_t>(nbytes / kCacheLine, 2);
  std::vector<std::uint64_t> order(lines);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  for (std::size_t i = lines - 1; i > 0; --i)
    std::swap(order[i], order[mulhi64(even_lane(philox_lane_pair(0, 0, i)), i)]);
  AlignedArray<std::uint64_t> memory(lines * kWords);
  for (std::size_t i = 0; i < lines; ++i) memory[i * kWords] = order[i] * kWords;
  std::uint64_t at = 0;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < steps; ++i) at = memory[at];
  keep(at);
  return seconds_of(start) * 1e9 / static_cast<double>(std::max<std::size_t>(steps, 1));
}

}  // namespace pearl
