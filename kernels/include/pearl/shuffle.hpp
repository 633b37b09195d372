// The random order of an epoch's rows: Fisher-Yates (Durstenfeld 1964) by Philox, the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pearl {

// Shuffles in place: for i = count - 1 down to 1, swaps items i and mulhi64(uniform_at(seed, call, i, 0), i + 1).
void shuffle(std::uint64_t seed, std::uint64_t call, std::int64_t* items, std::size_t count);

}  // namespace pearl
