// One device and its in-order queue: memory, kernels compiled from source, launches, and how many there were. The host code
// of the primitives on parallel devices (kernels/cpu/device/) uses it; SYCL and CUDA implement it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pearl/errors.hpp"

namespace pearl::device {

// A kernel compiled for one device.
class Kernel {
 public:
  virtual ~Kernel() = default;
};

// The kernels of one source, compiled for one device.
class Kernels {
 public:
  using Named = std::vector<std::pair<std::string, std::unique_ptr<const Kernel>>>;
  explicit Kernels(Named kernels) : kernels_(std::move(kernels)) {}
  // Throws DeviceError for a name that is not among them.
  const Kernel& operator[](std::string_view name) const;

 private:
  Named kernels_;
};

// An argument of a kernel. Pointers are to memory that the device reaches.
struct Argument {
  enum class Kind { pointer, int32, uint32, int64, uint64, float32 };

  template <class T>
  Argument(T* value) : kind(Kind::pointer), pointer(value) {}
  Argument(std::int32_t value) : kind(Kind::int32), int32(value) {}
  Argument(std::uint32_t value) : kind(Kind::uint32), uint32(value) {}
  Argument(std::int64_t value) : kind(Kind::int64), int64(value) {}
  Argument(std::uint64_t value) : kind(Kind::uint64), uint64(value) {}
  Argument(float value) : kind(Kind::float32), float32(value) {}

  Kind kind;
  union {
    const void* pointer;
    std::int32_t int32;
    std::uint32_t uint32;
    std::int64_t int64;
    std::uint64_t uint64;
    float float32;
  };
};

// A launch of `groups` work-groups, each of `cluster` blocks of rows x lanes items, which wait for each other. A block
// has `block_bytes` of memory of its own in addition to the memory that the kernel declares.
struct LaunchShape {
  std::size_t groups, rows, lanes, cluster = 1, block_bytes = 0;
};

// Launches of a queue that were recorded, to be made again in one go.
class Recording {
 public:
  virtual ~Recording() = default;
};

// The most iterations of a loop whose arguments lie in memory at once.
inline constexpr std::size_t kMostAhead = 64;

// Where memory lies: on the `device` alone, `shared` with the host (unified memory, which moves to the side that touches
// it), or `pinned` on the host.
enum class Placement { device, shared, pinned };

class DeviceQueue {
 public:
  // `is_cpu`: one thread of the device runs a work-group, its lanes as vectors. `team`: the kernels' kTeam.
  DeviceQueue(bool is_cpu, std::size_t team, std::size_t most_lanes, std::size_t most_groups)
      : is_cpu_(is_cpu), team_(team), most_lanes_(most_lanes), most_groups_(most_groups) {}
  virtual ~DeviceQueue() = default;
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  virtual std::string name() const = 0;
  bool is_cpu() const { return is_cpu_; }

  // Compiles the kernels of a source that the module embeds, by its stem ("column_store"); cached for each device. Throws
  // DeviceError with the compiler's log, or with the name of a kernel that the device cannot run.
  virtual std::shared_ptr<const Kernels> compile(const std::string& stem, const std::vector<std::string>& kernels,
                                                 const std::vector<std::string>& options = {}) = 0;
  // Launches `groups` work-groups of `lanes` items; in launch_rows, of rows x lanes items.
  template <class... Arguments>
  void launch(const Kernel& kernel, std::size_t groups, std::size_t lanes, Arguments... arguments) {
    launch_rows(kernel, groups, 1, lanes, arguments...);
  }
  template <class... Arguments>
  void launch_rows(const Kernel& kernel, std::size_t groups, std::size_t rows, std::size_t lanes,
                   Arguments... arguments) {
    launch_shape(kernel, {groups, rows, lanes}, arguments...);
  }
  template <class... Arguments>
  void launch_shape(const Kernel& kernel, const LaunchShape& shape, Arguments... arguments) {
    const Argument list[] = {Argument(arguments)...};
    if (!recording_here) ++launches_;
    enqueue(kernel, shape, list, sizeof...(arguments));
  }
  // How many blocks are best for each of `groups` work-groups that share no work: a power of two, at most `most`.
  std::size_t cluster_of(std::size_t groups, std::size_t most) const;
  // The most of them that a launch may have; 1 where blocks cannot wait for each other.
  virtual std::size_t most_cluster() const { return 1; }
  // The most of LaunchShape::block_bytes that launches of the kernel may have, which this makes possible.
  virtual std::size_t most_block_bytes(const Kernel&) const { return 0; }
  // Whether record() pays here: a recording costs the host one launch.
  virtual bool records() const { return false; }
  // Records the launches of `work` without running them. Arguments are kept: numbers, and pointers to memory that must
  // stay. `work` does nothing else with the queue.
  std::unique_ptr<const Recording> record(const std::function<void()>& work);
  // Launches all of a recording of this queue.
  void launch(const Recording& recording) {
    ++launches_;
    enqueue(recording);
  }
  // Copies between the device's and pinned memory, which must not change before wait(), after all launched kernels.
  // Returns at once.
  virtual void copy_async(const void* from, void* to, std::size_t bytes) = 0;
  // Copies between any memories, after all launched kernels, and waits.
  virtual void copy(const void* from, void* to, std::size_t bytes) = 0;
  // Waits for all launched kernels. Throws DeviceError where one failed.
  virtual void wait() = 0;
  // The same before memory is freed; a device that failed is not waited for.
  void settle();
  // Zeroed memory that kernels of the device read and write. Throws DeviceError where the device lacks this kind of
  // memory, has too little of it, or cannot allocate that much in one piece.
  virtual std::shared_ptr<void> allocate(std::size_t bytes, Placement placement) = 0;
  // Whether kernels can use the memory at `data`.
  virtual bool reaches(const void* data) const = 0;

  // The lanes of a single work-group that handles `count` items.
  std::size_t lanes(std::size_t count) const;
  std::size_t team() const { return team_; }
  // The same where a team of lanes handles each item.
  std::size_t team_lanes(std::size_t count) const { return lanes(count * team_); }
  // The most work-groups that speed up independent work.
  std::size_t most_groups() const { return most_groups_; }
  std::uint64_t launches() const { return launches_; }

 protected:
  virtual void enqueue(const Kernel& kernel, const LaunchShape& shape, const Argument* arguments,
                       std::size_t count) = 0;
  // The most blocks that are worth it in all clusters of a launch.
  virtual std::size_t most_clustered() const { return 1; }
  // While `work` runs, recording_here holds.
  virtual std::unique_ptr<const Recording> recorded(const std::function<void()>& work);
  virtual void enqueue(const Recording& recording);
  // Whether this thread's launches are recorded. Those of other threads are made.
  static thread_local bool recording_here;
  // While it lives, they are.
  struct RecordingHere {
    RecordingHere() { recording_here = true; }
    ~RecordingHere() { recording_here = false; }
    RecordingHere(const RecordingHere&) = delete;
    RecordingHere& operator=(const RecordingHere&) = delete;
  };
  std::atomic<std::uint64_t> launches_ = 0;

 private:
  bool is_cpu_;
  std::size_t team_;
  std::size_t most_lanes_;
  std::size_t most_groups_;
};

// Bytes of `count` items; on overflow, more than any device has.
inline std::size_t bytes_of(std::size_t count, std::size_t item_bytes) {
  return item_bytes != 0 && count > SIZE_MAX / item_bytes ? SIZE_MAX : count * item_bytes;
}

// As errors state it, for example "1.23 GB".
std::string gigabytes(std::size_t bytes);
// The first lines of a compiler's log: one error in a header may produce a thousand lines.
std::string shortened(const std::string& log);

// `count` zeroed items in memory of DeviceQueue::allocate().
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(DeviceQueue& queue, std::size_t count, Placement placement)
      : memory_(queue.allocate(bytes_of(count, sizeof(T)), placement)), count_(count) {}
  DeviceArray(DeviceArray&&) noexcept = default;
  DeviceArray& operator=(DeviceArray&&) noexcept = default;

  T* data() const { return static_cast<T*>(memory_.get()); }
  const std::shared_ptr<void>& memory() const { return memory_; }
  std::size_t size() const { return count_; }
  // Only for memory that the host can reach.
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  std::shared_ptr<void> memory_;
  std::size_t count_ = 0;
};

// `count` zeroed items that host and kernels pass to each other: on each side once, where the device has memory of its own.
template <class T>
class PassedArray {
 public:
  PassedArray() = default;
  PassedArray(DeviceQueue& queue, std::size_t count)
      : here_(queue, count, Placement::pinned), there_(queue, queue.is_cpu() ? 0 : count, Placement::device) {}

  // The host's items, and where kernels find them.
  T& operator[](std::size_t i) const { return here_[i]; }
  T* there() const { return there_.size() > 0 ? there_.data() : here_.data(); }
  // Enqueue copies of items, or of the first bytes.
  void send(DeviceQueue& queue, std::size_t first, std::size_t count) const {
    if (there_.size() > 0) queue.copy_async(&here_[first], there_.data() + first, count * sizeof(T));
  }
  // The host's item at `from` to the kernels' at `to`, where they have memory of their own; else once all launched kernels
  // have run.
  void send_to(DeviceQueue& queue, std::size_t from, std::size_t to) const {
    if (there_.size() > 0) {
      queue.copy_async(&here_[from], there_.data() + to, sizeof(T));
    } else if (from != to) {
      queue.wait();
      here_[to] = here_[from];
    }
  }
  void send_bytes(DeviceQueue& queue, std::size_t bytes) const {
    if (there_.size() > 0) queue.copy_async(here_.data(), there_.data(), bytes);
  }
  void fetch(DeviceQueue& queue) const {
    if (there_.size() > 0) queue.copy_async(there_.data(), here_.data(), there_.size() * sizeof(T));
  }

 private:
  DeviceArray<T> here_, there_;
};

}  // namespace pearl::device
