// CUDA's kernels on the host, for tests: functional only. Where threads run in ascending order, launches and copies are
// made at once, else as late as a GPU may make them: when they are waited for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulator.hpp"
#include "pearl/device/portable.hpp"
#include "pearl/device/queue.hpp"

namespace pearl::device {

class EmulatedQueue final : public DeviceQueue {
 public:
  // Blocks have at most `most_lanes` threads, whole warps of them, which run in an order given by `order` and, if shuffled, `seed`.
  EmulatedQueue(std::size_t most_lanes, emulator::Order order, std::uint64_t seed)
      : DeviceQueue(false, kThreadTeam, most_lanes, 4), order_(order), seed_(seed) {}

  std::string name() const override { return "CUDA emulator (functional only)"; }
  std::shared_ptr<const Kernels> compile(const std::string& stem, const std::vector<std::string>& kernels,
                                         const std::vector<std::string>& options = {}) override;
  bool records() const override { return true; }
  std::size_t most_cluster() const override { return emulator::kMostCluster; }
  std::size_t most_block_bytes(const Kernel&) const override { return 200 << 10; }  // about as much as an H100 has
  void copy_async(const void* from, void* to, std::size_t bytes) override;
  void copy(const void* from, void* to, std::size_t bytes) override;
  void wait() override;
  std::shared_ptr<void> allocate(std::size_t bytes, Placement placement) override;
  bool reaches(const void* data) const override;

 private:
  // What is allocated.
  struct Memory {
    std::mutex mutex;
    std::vector<std::pair<const char*, std::size_t>> pieces;
  };

  void refuse_while_recording() const;
  // Does `work` when it is due.
  void add(std::function<void()> work);
  void run_pending();
  std::size_t most_clustered() const override { return 8; }
  void enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments, std::size_t count) override;
  std::unique_ptr<const Recording> recorded(const std::function<void()>& work) override;
  void enqueue(const Recording& recording) override;

  emulator::Order order_;
  std::uint64_t seed_;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  std::mutex running_;
  std::vector<std::function<void()>> pending_;
};

}  // namespace pearl::device
