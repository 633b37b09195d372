// The Data Storage on a parallel device: one array for each column, copied to and from in one launch. The arrays lie in the
// device's memory, or pinned in the host's, from where kernels read the rows that are drawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pearl/device/queue.hpp"
#include "pearl/device/row_kernels.hpp"

namespace pearl::device {

using Bytes = DeviceArray<std::uint8_t>;

// Gathered rows of every column. Each has room for a multiple of 16 rows; rows past the batch are zero.
class RowBatch {
 public:
  RowBatch(DeviceQueue& queue, const std::vector<const void*>& columns, const std::vector<std::size_t>& row_bytes,
           std::size_t count, Placement placement);

  void* column(std::size_t i) const { return columns_[i].data(); }
  std::size_t room() const { return room_; }
  std::size_t count() const { return count_; }
  Placement placement() const { return placement_; }
  // The kernels' argument.
  const RowCopy* copies() const { return copies_.data(); }

 private:
  std::size_t count_, room_;
  Placement placement_;
  std::vector<Bytes> columns_;
  DeviceArray<RowCopy> copies_;
};

// Every method is thread-safe. insert and launch_gather return at once, the others wait. Rows are never torn: the queue
// is in-order.
class ColumnStore {
 public:
  ColumnStore(std::shared_ptr<DeviceQueue> queue, std::size_t capacity, std::vector<std::size_t> row_bytes,
              Placement placement = Placement::device);
  ~ColumnStore() { close(); }
  ColumnStore(const ColumnStore&) = delete;
  ColumnStore& operator=(const ColumnStore&) = delete;

  // Copies the first `count` rows of each array to rows start, start + 1, ... of a ring, in one launch unless there are
  // very many; without a launch to pinned memory, while no loop on the device may draw.
  void insert(std::size_t start, std::size_t count, const std::vector<const void*>& columns);
  // The rows at `indices`, in pinned or device memory that is not reused while the caller holds it. The caller has
  // checked `indices`, which lie in host memory.
  std::shared_ptr<RowBatch> gather(const std::int64_t* indices, std::size_t count,
                                   Placement placement = Placement::pinned);
  // Copies the first `count` rows of a column to the host.
  void read(std::size_t column, std::size_t count, void* rows) const;
  void close();

  // For loops on the device: a batch in its memory, kept until another count is requested.
  RowBatch& device_batch(std::size_t count) { return *shared_device_batch(count); }
  std::shared_ptr<RowBatch> shared_device_batch(std::size_t count);
  // Whether one work-group should copy that many rows.
  bool fit_one_group(std::size_t count) const;
  // How many work-groups should.
  std::size_t copying_groups(std::size_t count) const;
  // Gathers the rows at `indices`, which lie in device memory, into device_batch(count).
  void launch_gather(const std::int64_t* indices, std::size_t count);

  // A column in memory that kernels reach. Throws ReplayError after close().
  void* column(std::size_t i) const;
  const std::vector<std::size_t>& row_bytes() const { return row_bytes_; }
  std::size_t capacity() const { return capacity_; }
  const std::shared_ptr<DeviceQueue>& queue() const { return queue_; }

 private:
  void require_open() const;
  void insert_here(std::size_t start, std::size_t count, const std::vector<const void*>& columns);
  void stage(std::size_t rows);
  RowBatch& device_batch_locked(std::size_t count);
  void launch(const RowCopy* copies, const std::int64_t* from_rows, std::size_t to_first, std::size_t to_rows,
              std::size_t count);

  const std::shared_ptr<DeviceQueue> queue_;
  const std::size_t capacity_;
  const std::vector<std::size_t> row_bytes_;
  const std::size_t total_bytes_;  // of one row of all columns
  const Placement placement_;
  mutable std::mutex mutex_;
  std::vector<Bytes> columns_;
  std::vector<const void*> sources_;
  std::shared_ptr<const Kernels> kernels_;
  std::vector<Bytes> staging_;
  std::size_t staged_rows_ = 0;
  bool staging_busy_ = false;  // kernels may still read it
  DeviceArray<RowCopy> insertion_;
  PassedArray<std::int64_t> indices_;
  std::size_t room_for_indices_ = 0;
  std::vector<std::shared_ptr<RowBatch>> batches_;  // of gather(); callers may hold some
  std::shared_ptr<RowBatch> device_batch_;
};

}  // namespace pearl::device
