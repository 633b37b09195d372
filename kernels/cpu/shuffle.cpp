#include "pearl/shuffle.hpp"

#include <utility>

#include "pearl/philox.hpp"
#include "pearl/replay_kernels.hpp"

namespace pearl {

void shuffle(std::uint64_t seed, std::uint64_t call, std::int64_t* items, std::size_t count) {
  constexpr std::size_t kBlock = 256;  // of numbers at a time, the last ones first
  std::uint64_t numbers[kBlock];
  for (std::size_t end = count; end > 0;) {
    const std::size_t first = (end - 1) / kBlock * kBlock;
    replay_kernels().numbers(seed, call, first, end - first, numbers);
    for (std::size_t i = end; i-- > first;) std::swap(items[i], items[mulhi64(numbers[i - first], i + 1)]);
    end = first;
  }
}

}  // namespace pearl
