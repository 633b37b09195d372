// Insertion into and gathering from columns (structure of arrays) that the caller owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pearl {

// Throws ReplayError naming the first of the indices that lies outside [0, size).
void check_stored(const std::int64_t* indices, std::size_t count, std::size_t size);

// Gathers may run beside an insertion into other slots; insertions are one thread's at a time.
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

  std::size_t capacity() const { return capacity_; }
  const std::vector<Column>& columns() const { return columns_; }

 private:
  std::size_t capacity_;
  std::vector<Column> columns_;
};

}  // namespace pearl
