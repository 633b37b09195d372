// Copies of rows that lie anywhere, side by side into one block: what gathering large items comes down to.
#pragma once

#include <cstddef>
#include <vector>

namespace pearl {

// From this size on a row is worth a share of the copying; smaller ones are copied one by one.
constexpr std::size_t kWideRow = 2048;

// Copies `count` rows of `bytes` >= kWideRow to `target`, one after another.
using CopyRows = void (*)(const char* const* sources, std::size_t count, std::size_t bytes, char* target);

// Those that this machine runs, the fastest last; they differ in nothing but speed.
std::vector<CopyRows> copy_rows_variants();

// The fastest.
void copy_rows(const char* const* sources, std::size_t count, std::size_t bytes, char* target);

}  // namespace pearl
