// Copies of rows on parallel devices, for gathering from columns and inserting into them.
#pragma once

#include <cstdint>

#include "pearl/device/group.hpp"

namespace pearl::device {

// Source and target of one column's rows. Both begin at a multiple of 64 bytes.
struct RowCopy {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::uint64_t row_bytes;
};

// Copies `count` rows, from rows `from_rows` (null: consecutive from the first) to consecutive rows from `to_first` on in
// a ring of `to_rows`.
struct RowRange {
  const std::int64_t* from_rows;
  std::uint64_t to_first;
  std::uint64_t to_rows;
  std::uint64_t count;
};

#ifdef PEARL_KERNELS

// This work-item's index among all that copy.
struct RowLane {
  std::uint64_t lane, lanes;    // in its work-group
  std::uint64_t group, groups;
};

struct alignas(16) WideWord {
  std::uint32_t words[4];
};

template <class Word>
PEARL_DEVICE void copy_rows_of(const RowCopy& column, const RowRange& rows, const RowLane& at) {
  constexpr std::uint64_t kWide = 16;  // words of a row that lanes share, where a lane is a part of a vector
  const auto* const from = reinterpret_cast<const Word*>(column.from);
  auto* const to = reinterpret_cast<Word*>(column.to);
  const std::uint64_t words = column.row_bytes / sizeof(Word);
  const auto source = [&](std::uint64_t row) {
    return from + (rows.from_rows != nullptr ? static_cast<std::uint64_t>(rows.from_rows[row]) : row) * words;
  };
  const auto target = [&](std::uint64_t row) {
    const std::uint64_t place = rows.to_first + row;
    return to + (place < rows.to_rows ? place : place - rows.to_rows) * words;
  };
  if constexpr (kLanesAreThreads) {
    // Neighbours copy neighbouring words, of whichever row.
    const auto in_row = static_cast<std::uint32_t>(words);
    for (std::uint64_t i = at.group * at.lanes + at.lane; i < rows.count * words; i += at.groups * at.lanes) {
      const std::uint64_t row = i >> 32 == 0 ? static_cast<std::uint32_t>(i) / in_row : i / words;
      target(row)[i - row * words] = source(row)[i - row * words];
    }
  } else if (words >= kWide) {
    for (std::uint64_t row = at.group; row < rows.count; row += at.groups) {
      const Word* const read = source(row);
      Word* const write = target(row);
      for (std::uint64_t word = at.lane; word < words; word += at.lanes) write[word] = read[word];
    }
  } else {
    for (std::uint64_t row = at.group * at.lanes + at.lane; row < rows.count; row += at.groups * at.lanes) {
      const Word* const read = source(row);
      Word* const write = target(row);
      for (std::uint64_t word = 0; word < words; ++word) write[word] = read[word];
    }
  }
}

PEARL_DEVICE void copy_rows(const RowCopy* columns, std::uint32_t count, const RowRange& rows, const RowLane& at) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (kLanesAreThreads && columns[i].row_bytes % sizeof(WideWord) == 0)
      copy_rows_of<WideWord>(columns[i], rows, at);
    else if (columns[i].row_bytes % sizeof(std::uint32_t) == 0)
      copy_rows_of<std::uint32_t>(columns[i], rows, at);
    else
      copy_rows_of<std::uint8_t>(columns[i], rows, at);
  }
}

#endif

}  // namespace pearl::device
