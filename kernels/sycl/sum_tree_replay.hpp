// The Replay Manager on a SYCL device: identical to the CPU's (pearl/sum_tree_replay.hpp) bit for bit, for draws with
// replacement. Each of sample, insert, update and retrieve is one launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "column_store.hpp"
#include "device_queue.hpp"
#include "pearl/device_replay.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace pearl::device {

// A batch that stays where it was drawn. The arrays have room for a multiple of 16 items; those past the batch are 0.
class BatchMemory {
 public:
  BatchMemory() = default;
  BatchMemory(DeviceQueue& queue, std::size_t count, Placement placement);

  std::int64_t* indices() const { return indices_.data(); }
  float* weights() const { return weights_.data(); }
  std::uint32_t* generations() const { return generations_.data(); }
  // What kernels are given.
  const SampledBatch* arrays() const { return arrays_.data(); }
  std::size_t room() const { return indices_.size(); }
  std::size_t count() const { return count_; }

 private:
  std::size_t count_ = 0;
  DeviceArray<std::int64_t> indices_;
  DeviceArray<float> weights_;
  DeviceArray<std::uint32_t> generations_;
  DeviceArray<std::uint32_t> leaves_;
  DeviceArray<SampledBatch> arrays_;
};

// Every method is safe from any thread. Methods that take host arrays wait until they are done, and so do the kernels
// launched before them on the queue; launch_* return at once.
class SumTreeReplay final : public ReplayOperations {
 public:
  // Selections kPrioritized and kUniform with replacement, without a limit to how often an item is sampled, with any
  // initial priority but the mean.
  SumTreeReplay(std::shared_ptr<DeviceQueue> queue, std::int64_t capacity, unsigned fanout, double alpha,
                std::uint64_t seed, const ReplayOptions& options);

  // As pearl::SumTreeReplay has them.
  void insert(const std::int64_t* indices, const float* priorities, std::size_t count) override;
  void sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
              std::uint32_t* generations) override;
  std::size_t update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                     std::size_t count) override;
  void retrieve(const std::int64_t* indices, float* priorities, std::size_t count);
  void set_alpha(double alpha);
  ReplayState state() const;
  ReplayStatistics statistics() const;
  ReplayState save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves, std::uint16_t* times,
                   std::vector<std::int64_t>* order) const;
  void load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
            const std::uint32_t* leaves, const std::uint16_t* times, const std::int64_t* order,
            std::size_t order_count);
  void close();

  // For loops that stay on the device. The batch lies in this replay's device memory until the next launch_sample; the
  // rows that were drawn, if a store on the same queue is given, in store->device_batch(count). One launch, or two
  // where rows are large.
  const BatchMemory& launch_sample(std::size_t count, double beta, ColumnStore* store = nullptr);
  // Arrays in memory of the device, `generations` may be null. What is wrong with them changes nothing, and check()
  // tells of it.
  void launch_update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                     std::size_t count);
  // What launch_sample gave last; null before.
  const BatchMemory* device_batch() const;
  // Waits; throws what update() would have, had an update been launched that had to be refused since the last check.
  void check();

  std::size_t capacity() const override { return capacity_; }
  unsigned fanout() const { return fanout_; }
  bool prioritized() const override { return prioritized_; }
  const std::shared_ptr<DeviceQueue>& queue() const { return queue_; }

 private:
  void require_open() const;
  std::size_t lanes(std::size_t count) const;
  void begin_sample(std::size_t count, double beta);
  void count_draw(const BatchMemory& batch, std::size_t count);
  void launch_draw(const BatchMemory& batch, std::size_t count, double beta);
  void list_written();
  void stage(std::size_t count);
  void sum_all();
  void publish();
  ReplayState state_locked() const;
  template <class T>
  std::vector<T> copied(const DeviceArray<T>& array, std::size_t count) const;

  const std::shared_ptr<DeviceQueue> queue_;
  const std::size_t capacity_;
  const unsigned fanout_;
  const bool prioritized_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<const Kernels> kernels_;
  double alpha_;
  std::uint64_t call_ = 0;
  std::uint64_t inserts_ = 0;
  std::uint64_t samples_ = 0;
  std::size_t end_ = 0;  // one past the highest written slot
  bool written_current_ = false;
  DeviceArray<std::uint32_t> leaves_;
  DeviceArray<std::uint64_t> sums_;
  DeviceArray<ReplaySlot> slots_;
  DeviceArray<std::int64_t> written_;
  DeviceArray<ReplayProgress> progress_;  // pinned, as what the host hands over
  DeviceArray<UpdateRefusal> refusals_;   // of update(), of launch_update()
  ReplayMemory memory_{};
  DeviceArray<ReplayMemory> device_memory_;
  BatchMemory host_batch_;
  BatchMemory device_batch_;
  struct Staging {
    DeviceArray<std::int64_t> indices;
    DeviceArray<float> priorities;
    DeviceArray<std::uint32_t> generations;
  } staging_;
  // The last batch, from which statistics are computed when asked for.
  struct {
    const BatchMemory* batch = nullptr;
    std::size_t count = 0;
    std::uint32_t inserts = 0;
  } last_;
};

}  // namespace pearl::device
