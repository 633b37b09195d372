#include "pearl/device/column_store.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl::device {
namespace {

constexpr std::size_t kPadding = 16;
constexpr std::size_t kBatchesKept = 4;
constexpr std::size_t kStagedBytes = std::size_t{16} << 20;
// Fewer are not worth a work-group of their own, where a work-group is one thread, or many.
constexpr std::size_t kGroupBytes = std::size_t{64} << 10, kGroupBytesOfThreads = std::size_t{16} << 10;

std::size_t padded(std::size_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

std::vector<Bytes> allocated(DeviceQueue& queue, const std::vector<std::size_t>& row_bytes, std::size_t rows,
                             Placement placement) {
  std::vector<Bytes> memory;
  for (const std::size_t bytes : row_bytes) memory.emplace_back(queue, bytes_of(rows, bytes), placement);
  return memory;
}

}  // namespace

RowBatch::RowBatch(DeviceQueue& queue, const std::vector<const void*>& columns,
                   const std::vector<std::size_t>& row_bytes, std::size_t count, Placement placement)
    : count_(count),
      room_(padded(count)),
      placement_(placement),
      columns_(allocated(queue, row_bytes, room_, placement)),
      copies_(queue, columns.size(), placement) {
  std::vector<RowCopy> copies;
  for (std::size_t i = 0; i < columns.size(); ++i)
    copies.push_back({static_cast<const std::uint8_t*>(columns[i]), columns_[i].data(), row_bytes[i]});
  queue.copy(copies.data(), copies_.data(), copies.size() * sizeof copies[0]);
}

ColumnStore::ColumnStore(std::shared_ptr<DeviceQueue> queue, std::size_t capacity, std::vector<std::size_t> row_bytes,
                         Placement placement)
    : queue_(std::move(queue)),
      capacity_(capacity),
      row_bytes_(std::move(row_bytes)),
      total_bytes_(std::accumulate(row_bytes_.begin(), row_bytes_.end(), std::size_t{0})),
      placement_(placement),
      columns_(allocated(*queue_, row_bytes_, capacity, placement)),
      kernels_(queue_->compile("column_store", {"pearl_copy_rows"})),
      insertion_(*queue_, row_bytes_.size(), Placement::pinned) {
  for (const Bytes& column : columns_) sources_.push_back(column.data());
}

void* ColumnStore::column(std::size_t i) const {
  require_open();
  return columns_[i].data();
}

void ColumnStore::require_open() const {
  if (columns_.empty()) throw ReplayError("The Data Storage is closed.");
}

void ColumnStore::launch(const RowCopy* copies, const std::int64_t* from_rows, std::size_t to_first,
                         std::size_t to_rows, std::size_t count) {
  queue_->launch((*kernels_)["pearl_copy_rows"], copying_groups(count),
                 queue_->lanes(count * total_bytes_ / sizeof(std::uint32_t)), copies,
                 static_cast<std::uint32_t>(row_bytes_.size()), from_rows, std::uint64_t{to_first},
                 std::uint64_t{to_rows}, std::uint64_t{count});
}

void ColumnStore::insert(std::size_t start, std::size_t count, const std::vector<const void*>& columns) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (placement_ == Placement::pinned) return insert_here(start, count, columns);
  const std::size_t most = std::max<std::size_t>(kStagedBytes / std::max<std::size_t>(total_bytes_, 1), 1);
  for (std::size_t done = 0; done < count; done += most) {
    const std::size_t rows = std::min(most, count - done);
    if (std::exchange(staging_busy_, false)) queue_->wait();
    stage(rows);
    for (std::size_t i = 0; i < columns_.size(); ++i)
      std::memcpy(staging_[i].data(), static_cast<const std::uint8_t*>(columns[i]) + done * row_bytes_[i],
                  rows * row_bytes_[i]);
    staging_busy_ = true;
    launch(insertion_.data(), nullptr, (start + done) % capacity_, capacity_, rows);
  }
}

// To pinned memory: kernels that still read the rows that it overwrites end first.
void ColumnStore::insert_here(std::size_t start, std::size_t count, const std::vector<const void*>& columns) {
  queue_->wait();
  const std::size_t first = std::min(count, capacity_ - start);
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const auto* const from = static_cast<const std::uint8_t*>(columns[i]);
    std::memcpy(columns_[i].data() + start * row_bytes_[i], from, first * row_bytes_[i]);
    std::memcpy(columns_[i].data(), from + first * row_bytes_[i], (count - first) * row_bytes_[i]);
  }
}

void ColumnStore::stage(std::size_t rows) {
  if (staged_rows_ >= rows) return;
  staging_ = allocated(*queue_, row_bytes_, rows, Placement::pinned);
  staged_rows_ = rows;
  for (std::size_t i = 0; i < columns_.size(); ++i)
    insertion_[i] = {staging_[i].data(), columns_[i].data(), row_bytes_[i]};
}

std::shared_ptr<RowBatch> ColumnStore::gather(const std::int64_t* indices, std::size_t count, Placement placement) {
  const std::lock_guard lock(mutex_);
  require_open();
  std::shared_ptr<RowBatch> batch;
  for (const auto& kept : batches_)
    if (kept.use_count() == 1 && kept->count() == count && kept->placement() == placement) batch = kept;
  if (batch == nullptr) {
    batch = std::make_shared<RowBatch>(*queue_, sources_, row_bytes_, count, placement);
    const auto free = std::find_if(batches_.begin(), batches_.end(), [](const auto& b) { return b.use_count() == 1; });
    if (batches_.size() < kBatchesKept)
      batches_.push_back(batch);
    else if (free != batches_.end())
      *free = batch;
  }
  if (count == 0) return batch;
  if (room_for_indices_ < count) {
    indices_ = {*queue_, count};
    room_for_indices_ = count;
  }
  std::copy_n(indices, count, &indices_[0]);
  indices_.send(*queue_, 0, count);
  launch(batch->copies(), indices_.there(), 0, count, count);
  queue_->wait();
  staging_busy_ = false;
  return batch;
}

RowBatch& ColumnStore::device_batch_locked(std::size_t count) {
  require_open();
  if (device_batch_ == nullptr || device_batch_->count() != count)
    device_batch_ = std::make_shared<RowBatch>(*queue_, sources_, row_bytes_, count, Placement::device);
  return *device_batch_;
}

std::shared_ptr<RowBatch> ColumnStore::shared_device_batch(std::size_t count) {
  const std::lock_guard lock(mutex_);
  device_batch_locked(count);
  return device_batch_;
}

std::size_t ColumnStore::copying_groups(std::size_t count) const {
  const std::size_t bytes = queue_->is_cpu() ? kGroupBytes : kGroupBytesOfThreads;
  return std::clamp<std::size_t>(count * total_bytes_ / bytes, 1, queue_->most_groups());
}

bool ColumnStore::fit_one_group(std::size_t count) const { return count * total_bytes_ <= kGroupBytes; }

void ColumnStore::launch_gather(const std::int64_t* indices, std::size_t count) {
  const std::lock_guard lock(mutex_);
  launch(device_batch_locked(count).copies(), indices, 0, count, count);
}

void ColumnStore::read(std::size_t column, std::size_t count, void* rows) const {
  const std::lock_guard lock(mutex_);
  require_open();
  queue_->copy(columns_[column].data(), rows, count * row_bytes_[column]);
}

void ColumnStore::close() {
  const std::lock_guard lock(mutex_);
  queue_->settle();
  columns_.clear();
  sources_.clear();
  staging_.clear();
  staged_rows_ = 0;
  batches_.clear();
  device_batch_.reset();
  indices_ = {};
  room_for_indices_ = 0;
}

}  // namespace pearl::device
