#include "pearl/column_store.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl {
namespace {

constexpr std::size_t kAhead = 16;  // rows in flight: random rows are bound by memory latency

// A fixed size lets the compiler turn the copy into one or two moves.
template <std::size_t Bytes>
void gather_fixed(const char* column, const std::int64_t* indices, std::size_t count, char* target) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(column + static_cast<std::size_t>(indices[i + kAhead]) * Bytes, 0, 0);
    std::memcpy(target + i * Bytes, column + static_cast<std::size_t>(indices[i]) * Bytes, Bytes);
  }
}

void gather_rows(const char* column, std::size_t bytes, const std::int64_t* indices, std::size_t count, char* target) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const char* next = column + static_cast<std::size_t>(indices[i + kAhead]) * bytes;
      for (std::size_t at = 0; at < bytes && at < 256; at += 64) __builtin_prefetch(next + at, 0, 0);
    }
    std::memcpy(target + i * bytes, column + static_cast<std::size_t>(indices[i]) * bytes, bytes);
  }
}

void gather_column(const ColumnStore::Column& column, const std::int64_t* indices, std::size_t count, char* target) {
  switch (column.item_bytes) {
    case 1: return gather_fixed<1>(column.data, indices, count, target);
    case 2: return gather_fixed<2>(column.data, indices, count, target);
    case 4: return gather_fixed<4>(column.data, indices, count, target);
    case 8: return gather_fixed<8>(column.data, indices, count, target);
    case 16: return gather_fixed<16>(column.data, indices, count, target);
    case 32: return gather_fixed<32>(column.data, indices, count, target);
    case 64: return gather_fixed<64>(column.data, indices, count, target);
    default: return gather_rows(column.data, column.item_bytes, indices, count, target);
  }
}

}  // namespace

void check_stored(const std::int64_t* indices, std::size_t count, std::size_t size) {
  for (std::size_t i = 0; i < count; ++i)
    if (static_cast<std::uint64_t>(indices[i]) >= size)
      throw ReplayError("Index at position " + std::to_string(i) + " must lie in [0, " + std::to_string(size) +
                        "), the rows stored; found " + std::to_string(indices[i]) + ".");
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
  for (std::size_t i = 0; i < columns_.size(); ++i)
    gather_column(columns_[i], indices, count, static_cast<char*>(targets[i]));
}

}  // namespace pearl
