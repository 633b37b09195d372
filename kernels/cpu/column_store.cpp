#include "pearl/column_store.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "pearl/errors.hpp"
#include "pearl/row_copy.hpp"

namespace pearl {
namespace {

// Prefetch distance for rows of at most a line. Random rows are bound by memory latency: with 96 a row took half as long
// as with 16 or without prefetching. (Measured with 32 to 128.)
constexpr std::size_t kAhead = 96;
constexpr std::size_t kLine = 64;
constexpr std::size_t kLongAhead = 16;  // for longer rows; up to four lines each, hardware prefetches the rest
constexpr std::size_t kStepsAhead = 2;  // for runs of rows, likewise

// Rows to prefetch, one for each row copied.
struct Fetch {
  const char* data;
  std::size_t item_bytes;
  const std::int64_t* indices;
};

// A compile-time size (std::integral_constant) lets the compiler turn the copy into one or two moves.
template <class Bytes>
void gather_rows(const char* column, Bytes bytes, const std::int64_t* indices, std::size_t count, char* target,
                 Fetch fetch) {
  for (std::size_t i = 0; i < count; ++i) {
    __builtin_prefetch(fetch.data + static_cast<std::size_t>(fetch.indices[i]) * fetch.item_bytes, 0, 0);
    std::memcpy(target + i * bytes, column + static_cast<std::size_t>(indices[i]) * bytes, bytes);
  }
}

template <std::size_t Bytes>
constexpr std::integral_constant<std::size_t, Bytes> kBytes;

void gather_short(const ColumnStore::Column& column, const std::int64_t* indices, std::size_t count, char* target,
                  Fetch fetch) {
  switch (column.item_bytes) {
    case 1: return gather_rows(column.data, kBytes<1>, indices, count, target, fetch);
    case 2: return gather_rows(column.data, kBytes<2>, indices, count, target, fetch);
    case 4: return gather_rows(column.data, kBytes<4>, indices, count, target, fetch);
    case 8: return gather_rows(column.data, kBytes<8>, indices, count, target, fetch);
    case 16: return gather_rows(column.data, kBytes<16>, indices, count, target, fetch);
    case 32: return gather_rows(column.data, kBytes<32>, indices, count, target, fetch);
    case 64: return gather_rows(column.data, kBytes<64>, indices, count, target, fetch);
    default: return gather_rows(column.data, column.item_bytes, indices, count, target, fetch);
  }
}

// May read `known` >= count indices, to prefetch rows.
void gather_long(const char* column, std::size_t bytes, const std::int64_t* indices, std::size_t count,
                 std::size_t known, char* target) {
  if (bytes >= kWideRow) {
    std::vector<const char*> sources(count);
    for (std::size_t i = 0; i < count; ++i) sources[i] = column + static_cast<std::size_t>(indices[i]) * bytes;
    return copy_rows(sources.data(), count, bytes, target);
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kLongAhead < known) {
      const char* next = column + static_cast<std::size_t>(indices[i + kLongAhead]) * bytes;
      for (std::size_t at = 0; at < bytes && at < 4 * kLine; at += kLine) __builtin_prefetch(next + at, 0, 0);
    }
    std::memcpy(target + i * bytes, column + static_cast<std::size_t>(indices[i]) * bytes, bytes);
  }
}

// Gathers short columns one after another, prefetching kAhead rows ahead, across the ends of columns.
class ShortColumns {
 public:
  ShortColumns(const std::int64_t* indices, std::size_t count, std::size_t columns) : indices_(indices), count_(count) {
    columns_.reserve(columns);
    targets_.reserve(columns);
  }

  void add(const ColumnStore::Column& column, char* target) {
    columns_.push_back(column);
    targets_.push_back(target);
  }

  void gather() {
    for (std::size_t left = kAhead; left > 0 && fetched_ < columns_.size();) {
      const std::size_t part = std::min(left, count_ - row_);
      const Fetch fetch = fetch_rows(part);
      for (std::size_t i = 0; i < part; ++i)
        __builtin_prefetch(fetch.data + static_cast<std::size_t>(fetch.indices[i]) * fetch.item_bytes, 0, 0);
      left -= part;
    }
    for (std::size_t c = 0; c < columns_.size(); ++c)
      for (std::size_t at = 0; at < count_;) {
        const bool more = fetched_ < columns_.size();
        const std::size_t part = more ? std::min(count_ - at, count_ - row_) : count_ - at;
        // With nothing left to prefetch, prefetch the rows being copied, which costs nothing.
        const Fetch fetch = more ? fetch_rows(part) : Fetch{columns_[c].data, columns_[c].item_bytes, indices_ + at};
        gather_short(columns_[c], indices_ + at, part, targets_[c] + at * columns_[c].item_bytes, fetch);
        at += part;
      }
  }

 private:
  // The next `part` rows to prefetch, all of one column.
  Fetch fetch_rows(std::size_t part) {
    const Fetch fetch{columns_[fetched_].data, columns_[fetched_].item_bytes, indices_ + row_};
    row_ += part;
    if (row_ == count_) {
      row_ = 0;
      ++fetched_;
    }
    return fetch;
  }

  const std::int64_t* indices_;
  std::size_t count_;
  std::vector<ColumnStore::Column> columns_;
  std::vector<char*> targets_;
  std::size_t fetched_ = 0;  // column and row to prefetch next
  std::size_t row_ = 0;
};

bool successive(const std::int64_t* slots, std::size_t count) {
  bool broken = false;
  for (std::size_t i = 1; i < count; ++i) broken |= slots[i] != slots[i - 1] + 1;
  return !broken;
}

}  // namespace

void check_stored(const std::int64_t* indices, std::size_t count, std::size_t size) {
  for (std::size_t i = 0; i < count; ++i)
    if (static_cast<std::uint64_t>(indices[i]) >= size)
      throw ReplayError("Index at position " + std::to_string(i) + " must lie in [0, " + std::to_string(size) +
                        "), the rows stored; found " + std::to_string(indices[i]) + ".");
}

void mask_steps(const Steps& steps, bool* mask) {
  for (std::size_t i = 0; i < steps.count; ++i, mask += steps.length) {
    std::memset(mask, 0, steps.length);
    std::memset(mask + steps.first(i), 1, static_cast<std::size_t>(steps.found[i]));
  }
}

void clear_steps(const Steps& steps, std::size_t item_bytes, char* target) {
  for (std::size_t i = 0; i < steps.count; ++i, target += steps.length * item_bytes) {
    const std::size_t first = steps.first(i);
    const std::size_t end = first + static_cast<std::size_t>(steps.found[i]);
    std::memset(target, 0, first * item_bytes);
    std::memset(target + end * item_bytes, 0, (steps.length - end) * item_bytes);
  }
}

ColumnStore::ColumnStore(std::size_t capacity, std::vector<Column> columns)
    : capacity_(capacity), columns_(std::move(columns)) {}

void ColumnStore::insert(std::size_t start, std::size_t count, const std::vector<const void*>& sources) {
  const std::size_t before_end = capacity_ - start < count ? capacity_ - start : count;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const std::size_t bytes = columns_[i].item_bytes;
    const char* source = static_cast<const char*>(sources[i]);
    std::memcpy(columns_[i].data + start * bytes, source, before_end * bytes);
    std::memcpy(columns_[i].data, source + before_end * bytes, (count - before_end) * bytes);
  }
}

void ColumnStore::gather(const std::int64_t* indices, std::size_t count, std::size_t size,
                         const std::vector<void*>& targets) const {
  check_stored(indices, count, size);
  if (count == 0) return;
  ShortColumns short_columns(indices, count, columns_.size());
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const auto target = static_cast<char*>(targets[i]);
    if (columns_[i].item_bytes <= kLine)
      short_columns.add(columns_[i], target);
    else
      gather_long(columns_[i].data, columns_[i].item_bytes, indices, count, count, target);
  }
  short_columns.gather();
}

void ColumnStore::gather_steps(std::size_t column, const Steps& steps, char* target) const {
  const Column& from = columns_[column];
  const std::size_t bytes = from.item_bytes;
  const std::int64_t* all_end = steps.slots + steps.count * steps.length;
  const auto slots_of = [&](std::size_t row) { return steps.slots + row * steps.length + steps.first(row); };
  for (std::size_t i = 0; i < steps.count; ++i) {
    if (i + kStepsAhead < steps.count) {
      const char* next = from.data + static_cast<std::size_t>(*slots_of(i + kStepsAhead)) * bytes;
      for (std::size_t at = 0; at < 256; at += 64) __builtin_prefetch(next + at, 0, 0);
    }
    const std::int64_t* slots = slots_of(i);
    const auto found = static_cast<std::size_t>(steps.found[i]);
    char* to = target + (i * steps.length + steps.first(i)) * bytes;
    if (successive(slots, found))  // always so with a single stream, unless the ring wraps
      std::memcpy(to, from.data + static_cast<std::size_t>(slots[0]) * bytes, found * bytes);
    else if (const auto known = static_cast<std::size_t>(all_end - slots); bytes > kLine)
      gather_long(from.data, bytes, slots, found, known, to);
    else
      gather_short(from, slots, found, to, {from.data, bytes, slots + (found + kAhead <= known ? kAhead : 0)});
  }
  clear_steps(steps, bytes, target);
}

}  // namespace pearl
