// Checks and statistics of a batch, shared by the Replay Managers on devices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace pearl::device {

inline void check_count(std::size_t count, const char* device) {
  constexpr std::size_t kMostItems = (std::size_t{1} << 31) - 1;  // positions have 31 bits
  if (count > kMostItems)
    throw ReplayError("A batch on " + std::string(device) + " has at most " + std::to_string(kMostItems) +
                      " items; found " + std::to_string(count) + ".");
}

[[noreturn]] inline void throw_unwritten(std::int64_t index, std::size_t position) {
  throw ReplayError("Index " + std::to_string(index) + " at position " + std::to_string(position) +
                    " was never inserted: only written slots can be updated.");
}

// Fills in the statistics of the last batch, drawn after `inserts` insertions, as every Replay Manager computes them.
inline void describe_batch(const float* weights, const std::uint32_t* generations, std::size_t count,
                           std::uint32_t inserts, ReplayStatistics& statistics) {
  std::uint64_t ages = 0, sum = 0, squares = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t age = inserts - generations[i];
    ages += age;
    statistics.age_max = std::max(statistics.age_max, age);
    const auto units = static_cast<std::uint64_t>(weights[i] * 0x1p24f);
    sum += units;
    squares += (units * units) >> 16;
  }
  statistics.age_mean = static_cast<double>(ages) / static_cast<double>(count);
  statistics.effective_sample_size =
      static_cast<double>(sum) * static_cast<double>(sum) / static_cast<double>(squares) * 0x1p-16;
}

}  // namespace pearl::device
