// Normal numbers of Philox words: the ends of the range, the moments, and that a number stays the same however it is drawn.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "pearl/normal.hpp"
#include "pearl/philox.hpp"

using namespace pearl;

namespace {

void every_word_gives_a_finite_number() {
  const std::uint32_t ends[] = {0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF00, 0xFFFFFFFE, 0xFFFFFFFF};
  for (const std::uint32_t distance : ends)
    for (const std::uint32_t direction : ends) {
      const NormalPair pair = normal_pair(distance, direction);
      CHECK(std::isfinite(pair.first) && std::isfinite(pair.second));
    }
  CHECK(std::fabs(minus_two_log_uniform(0) - 44.3614195558f) < 1e-4f);  // 64 log(2)
  CHECK(minus_two_log_uniform(0xFFFFFFFF) == 0.0f);
  float before = minus_two_log_uniform(0);
  for (std::uint32_t word = 1 << 16; word >= 1 << 16; word += 1 << 16) {
    const float found = minus_two_log_uniform(word);
    const double exact = -2.0 * std::log((static_cast<double>(word >> 1) + 0.5) * 0x1p-31);
    CHECK(std::fabs(static_cast<double>(found) - exact) < 1e-6 * (1.0 + exact));
    CHECK(found <= before);
    before = found;
  }
}

void directions_go_once_around() {
  constexpr double kTurn = 6.283185307179586;
  const float radius = std::sqrt(minus_two_log_uniform(0x60000000));
  for (std::uint32_t k = 0; k < 4096; ++k) {
    const std::uint32_t direction = k << 20;
    const NormalPair pair = normal_pair(0x60000000, direction);
    // The lower half of a quarter is what comes before it, once its 30 bits are read as signed.
    const double part = static_cast<double>(direction & 0x3FFFFFFF) * 0x1p-30;
    const double quarter = static_cast<double>(direction >> 30) + (part >= 0.5 ? part - 1.0 : part);
    const double angle = kTurn / 4.0 * quarter;
    CHECK(std::fabs(static_cast<double>(pair.first / radius) - std::cos(angle)) < 3e-7);
    CHECK(std::fabs(static_cast<double>(pair.second / radius) - std::sin(angle)) < 3e-7);
  }
}

void numbers_stand_where_their_counter_says() {
  constexpr std::uint64_t kSeed = 0x123456789ABCDEF, kStep = 0x500000007;
  std::vector<float> all(1000);
  fill_normal(kSeed, kStep, 3, all.size(), all.data());
  for (std::uint32_t block = 0; block < 250; ++block) {
    const PhiloxWords words = philox4x32({block, 3, 7, 5}, kSeed);
    const NormalPair first = normal_pair(words[0], words[1]), second = normal_pair(words[2], words[3]);
    CHECK(all[4 * block] == first.first && all[4 * block + 1] == first.second);
    CHECK(all[4 * block + 2] == second.first && all[4 * block + 3] == second.second);
  }
  for (const std::size_t count : {0u, 1u, 3u, 255u, 256u, 257u, 999u}) {
    std::vector<float> some(count);  // exactly as long as needed: the sanitizer sees every access beyond
    fill_normal(kSeed, kStep, 3, count, some.data());
    for (std::size_t i = 0; i < count; ++i) CHECK(some[i] == all[i]);
  }
}

void moments_are_those_of_the_normal_distribution() {
  constexpr std::size_t kCount = 1 << 20;
  std::vector<float> numbers(kCount);
  fill_normal(9, 0, 0, kCount, numbers.data());
  double sums[5] = {};
  for (const float number : numbers) {
    double power = 1.0;
    for (double& sum : sums) {
      sum += power / kCount;
      power *= static_cast<double>(number);
    }
  }
  CHECK(std::fabs(sums[1]) < 0.005 && std::fabs(sums[2] - 1.0) < 0.007);
  CHECK(std::fabs(sums[3]) < 0.02 && std::fabs(sums[4] - 3.0) < 0.05);
}

}  // namespace

int main() {
  every_word_gives_a_finite_number();
  directions_go_once_around();
  numbers_stand_where_their_counter_says();
  moments_are_those_of_the_normal_distribution();
}
