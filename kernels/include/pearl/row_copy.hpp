// Copies scattered rows into one block, for gathering large items.
#pragma once

#include <cstddef>
#include <vector>

namespace pearl {

// From this size on, interleaved copies of rows are faster; smaller rows are copied one by one.
constexpr std::size_t kWideRow = 2048;

// Copies `count` rows of `bytes` >= kWideRow to `target`, one after another.
using CopyRows = void (*)(const char* const* sources, std::size_t count, std::size_t bytes, char* target);

// The variants that this machine runs, fastest last; they differ only in speed.
std::vector<CopyRows> copy_rows_variants();

// The fastest.
void copy_rows(const char* const* sources, std::size_t count, std::size_t bytes, char* target);

}  // namespace pearl
