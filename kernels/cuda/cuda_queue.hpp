// A CUDA device's queue: a stream of its primary context, which torch uses too. Kernels are compiled by NVRTC.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "driver.hpp"
#include "pearl/device/queue.hpp"

namespace pearl::device {

// Where NVRTC is, and the folder that keeps what it compiled, which only its owner can write; "" keeps nothing.
struct CudaCompiler {
  std::string library, cache;
};

// Shared by all queues of a device.
struct CudaDevice;

class CudaQueue final : public DeviceQueue {
 public:
  // Throws DeviceError where the device cannot be used.
  CudaQueue(int index, CudaCompiler compiler);
  ~CudaQueue() override;

  std::string name() const override;
  cuda::Stream stream() const { return stream_; }
  // Whether the host may touch managed memory while kernels run. If not, Placement::shared is pinned memory.
  bool shares_memory() const;
  // Compiles kernels/cuda/<stem>.cu.
  std::shared_ptr<const Kernels> compile(const std::string& stem, const std::vector<std::string>& kernels,
                                         const std::vector<std::string>& options = {}) override;
  std::size_t most_cluster() const override;
  std::size_t most_block_bytes(const Kernel& kernel) const override;
  // The launches of `work` go to `stream`, which another library records.
  void record_on(cuda::Stream stream, const std::function<void()>& work);
  bool records() const override { return true; }
  void copy_async(const void* from, void* to, std::size_t bytes) override;
  void copy(const void* from, void* to, std::size_t bytes) override;
  void wait() override;
  std::shared_ptr<void> allocate(std::size_t bytes, Placement placement) override;
  bool reaches(const void* data) const override;

 private:
  std::size_t most_clustered() const override;
  void enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments, std::size_t count) override;
  std::unique_ptr<const Recording> recorded(const std::function<void()>& work) override;  // a CUDA graph
  void enqueue(const Recording& recording) override;

  std::shared_ptr<CudaDevice> device_;
  CudaCompiler compiler_;
  cuda::Stream stream_ = nullptr;
};

// Whether a binary may come from the cache.
enum class Cache { read, ignore };

// Compiles kernels/cuda/<stem>.cu for a compute capability; needs no GPU. See cuda::compiled.
std::vector<char> cuda_binary(const CudaCompiler& compiler, const std::string& stem, int major, int minor,
                              const std::vector<std::string>& options, Cache cache = Cache::read);

}  // namespace pearl::device
