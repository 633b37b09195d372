// The Replay Manager on a parallel device. It equals the CPU's (pearl/sum_tree_replay.hpp) bit for bit, for draws with
// replacement. Each of insert, update and retrieve is one launch, and sample one or two.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pearl/device/column_store.hpp"
#include "pearl/device/queue.hpp"
#include "pearl/device/replay_kernels.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace pearl::device {

// A drawn batch. Arrays have room for a multiple of 16 items; items past the batch are 0. The leaves, which only kernels
// need, lie in the device's memory.
class BatchMemory {
 public:
  BatchMemory() = default;
  BatchMemory(DeviceQueue& queue, std::size_t count, Placement placement);

  std::int64_t* indices() const { return reinterpret_cast<std::int64_t*>(block_.data()); }
  float* weights() const { return reinterpret_cast<float*>(block_.data() + room_ * sizeof(std::int64_t)); }
  std::uint32_t* generations() const { return reinterpret_cast<std::uint32_t*>(weights() + room_); }
  // The kernels' argument.
  const SampledBatch* arrays() const { return arrays_.data(); }
  // All but the leaves.
  const DeviceArray<char>& block() const { return block_; }
  std::size_t room() const { return room_; }
  std::size_t count() const { return count_; }

 private:
  std::size_t count_ = 0, room_ = 0;
  DeviceArray<char> block_;
  DeviceArray<std::uint32_t> leaves_;
  DeviceArray<SampledBatch> arrays_;
};

// Every method is thread-safe. Those that return what kernels find wait for these, and for all launched before on the
// queue; insert, update and launch_* return at once.
class SumTreeReplay final : public ReplayOperations {
 public:
  // Supports kPrioritized and kUniform with replacement, without a limit of samples per item, and every initial
  // priority except the mean.
  SumTreeReplay(std::shared_ptr<DeviceQueue> queue, std::int64_t capacity, unsigned fanout, double alpha,
                std::uint64_t seed, const ReplayOptions& options);
  ~SumTreeReplay() override { close(); }
  SumTreeReplay(const SumTreeReplay&) = delete;
  SumTreeReplay& operator=(const SumTreeReplay&) = delete;

  // As in pearl::SumTreeReplay.
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

  // For loops on the device, while nothing is inserted: works out the next `draws` draws of `count` items, at most
  // kMostAhead. Waits if others were prepared since check().
  void prepare_draws(std::size_t draws, std::size_t count, double beta);
  // Enqueues a prepared draw, from 0. The batch lies in this replay's device memory until the next. With a store on the
  // same queue, the drawn rows go to store->device_batch(count). One launch, or two where rows are large or many
  // work-groups draw. Nothing is drawn once `failure`, if it is given, points to something other than 0.
  const BatchMemory& launch_draw(std::size_t place, std::size_t count, ColumnStore* store = nullptr,
                                 const std::int32_t* failure = nullptr);
  // The same for one iteration, which may be launched while those before run: its draw is in place 0, once theirs are
  // made. Counts its update.
  void prepare_iteration(std::size_t count, double beta);
  // Takes arrays in device memory; `generations` may be null. An invalid batch changes nothing; check() reports it.
  // `failure` as for launch_draw.
  void launch_update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                     std::size_t count, const std::int32_t* failure = nullptr);
  // Launches recorded draws and updates: no other call comes between its parts, nor they between those of another.
  void launch(const Recording& recording);
  // Counts items of launched updates; without priorities, an update is nothing else.
  void count_updates(std::size_t count);
  // The batch of the last draw; null before.
  const BatchMemory* device_batch() const;
  // Waits. Throws the error of an update launched since the last check, if it was refused.
  void check();
  // The same where the queue was waited for. Other threads may have inserted since.
  void check_waited();

  std::size_t capacity() const override { return capacity_; }
  unsigned fanout() const { return fanout_; }
  bool prioritized() const override { return prioritized_; }
  const std::shared_ptr<DeviceQueue>& queue() const { return queue_; }

 private:
  void require_open() const;
  // Of insertions and updates, which may have to requantise every slot. On a CPU, idle lanes cost time.
  std::size_t writing_lanes(std::size_t count) const {
    return queue_->lanes(prioritized_ && !queue_->is_cpu() ? std::max(count, capacity_) : count);
  }
  void begin_sample(std::size_t count, double beta);
  Draw next_draw(std::size_t count, double beta);
  // A draw for the kernels: its place in memory, or, if that is null, its values.
  struct DrawArgument {
    const Draw* there;
    Draw own;
  };
  void begin_draws(std::size_t count, double beta);
  void launch_sampling(const BatchMemory& batch, std::size_t count, const DrawArgument& draw, ColumnStore* store,
                       const std::int32_t* failure);
  void count_updates_locked(std::size_t count);
  void check_locked();
  const ReplayProgress& fetched() const;
  void set_progress(const ReplayProgress& progress);
  void list_written();
  // Host arrays for kernels; `busy` while these may still read them.
  struct Staging {
    DeviceArray<std::int64_t> indices;
    DeviceArray<float> priorities;
    DeviceArray<std::uint32_t> generations;
    bool busy = false;
  };
  // `staging` with room for `count` items, once no kernel reads it.
  Staging& staged(Staging& staging, std::size_t count);
  void wait() const;
  void launch_update_locked(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                            std::size_t count, const std::int32_t* failure);
  void sum_all();
  void publish();
  ReplayState state_locked() const;
  template <class T>
  std::vector<T> copied(const T* array, std::size_t count) const;

  const std::shared_ptr<DeviceQueue> queue_;
  const std::size_t capacity_;
  const unsigned fanout_;
  const bool prioritized_, stratified_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<const Kernels> kernels_;
  ReplayState known_;  // the part of the state that the host keeps: alpha, seed, call, inserts, samples and filled
  std::vector<std::uint32_t> generations_;  // of the slots up to the highest written one, as the device has them
  bool written_current_ = false;
  DeviceArray<std::uint32_t> leaves_;
  DeviceArray<std::uint64_t> sums_;
  DeviceArray<ReplaySlot> slots_;
  DeviceArray<std::int64_t> written_;
  PassedArray<ReplayProgress> progress_;
  DeviceArray<UpdateRefusal> refusal_;  // pinned: of launch_update()
  PassedArray<Draw> draws_;
  std::size_t prepared_ = 0;              // of draws_, since check()
  ReplayMemory memory_{};
  DeviceArray<ReplayMemory> device_memory_;
  BatchMemory host_batch_;  // of sample(): kernels write it to pinned memory
  BatchMemory device_batch_;
  mutable Staging inserted_, given_;  // to insert(); to update() and retrieve()
  // The last batch, for statistics().
  struct {
    const BatchMemory* batch = nullptr;
    std::size_t count = 0;
    std::uint32_t inserts = 0;
  } last_;
};

}  // namespace pearl::device
