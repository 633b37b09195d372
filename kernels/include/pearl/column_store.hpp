// Insertion into and gathering from columns (structure of arrays) that the caller owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pearl {

// Throws ReplayError naming the first index outside [0, size).
void check_stored(const std::int64_t* indices, std::size_t count, std::size_t size);

// Successive items: `slots` (count, length). In row i the first `found[i]` are valid, or the last if `at_end`.
struct Steps {
  const std::int64_t* slots;
  const std::int64_t* found;
  std::size_t count;
  std::size_t length;
  bool at_end;

  std::size_t first(std::size_t row) const { return at_end ? length - static_cast<std::size_t>(found[row]) : 0; }
};

// Writes to `mask` (count, length) whether each step is valid.
void mask_steps(const Steps& steps, bool* mask);
// Zeroes the items of `item_bytes` in `target` (count, length) that are not valid.
void clear_steps(const Steps& steps, std::size_t item_bytes, char* target);

// Gathers may run during an insertion into other slots; only one thread inserts at a time.
class ColumnStore {
 public:
  struct Column {
    char* data;
    std::size_t item_bytes;
  };

  ColumnStore(std::size_t capacity, std::vector<Column> columns);

  // Copies `count` rows of each source into the ring from slot `start` on; count <= capacity.
  void insert(std::size_t start, std::size_t count, const std::vector<const void*>& sources);
  // Copies the rows at `indices` out; throws ReplayError unless all lie in [0, size).
  void gather(const std::int64_t* indices, std::size_t count, std::size_t size,
              const std::vector<void*>& targets) const;
  // Copies the valid steps from one column to `target` (count, length) and zeroes the others. Valid slots must lie in
  // the column.
  void gather_steps(std::size_t column, const Steps& steps, char* target) const;

  std::size_t capacity() const { return capacity_; }
  const std::vector<Column>& columns() const { return columns_; }

 private:
  std::size_t capacity_;
  std::vector<Column> columns_;
};

}  // namespace pearl
