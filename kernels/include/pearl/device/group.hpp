// The device as kernels see it, for SYCL, for CUDA, and for CUDA's kernels on the host (kernels/cuda/emulator.hpp): the
// work-item's place, barriers, sums over the work-group, and atomics. Host code sees nothing of it.
//
// A work-group has rows x lanes work-items. In CUDA's words it is a block, and a lane a thread.
#pragma once

#include <cstdint>

#include "pearl/device/math.hpp"

#ifdef PEARL_SYCL_KERNELS

#define PEARL_KERNEL \
  extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<2>)) void

namespace pearl::device {

inline constexpr bool kLanesAreThreads = false;  // parts of vectors, which CPUs have

// This work-item's place in its work-group, and its work-group's among all.
struct Place {
  sycl::group<2> work_group;
  std::uint64_t lane, lanes, row, rows, group, groups;
};

inline Place place_here() {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  return {item.get_group(),        item.get_local_id(1), item.get_local_range(1), item.get_local_id(0),
          item.get_local_range(0), item.get_group(1),    item.get_group_range(1)};
}

inline void barrier(const Place& place) { sycl::group_barrier(place.work_group); }

// Over the work-group; every work-item calls them, and all get the result.
template <class T>
T largest(const Place& place, T value) {
  return sycl::reduce_over_group(place.work_group, value, sycl::maximum<T>());
}
template <class T>
T least(const Place& place, T value) {
  return sycl::reduce_over_group(place.work_group, value, sycl::minimum<T>());
}
template <class T>
T sum(const Place& place, T value) {
  return sycl::reduce_over_group(place.work_group, value, sycl::plus<T>());
}

template <class T>
using Atomic = sycl::atomic_ref<T, sycl::memory_order::relaxed, sycl::memory_scope::device,
                                sycl::access::address_space::global_space>;

// As on CUDA.
template <class T>
T glance(const T& at) {
  return at;
}
template <class T>
void write_alike(T& at, T value) {
  at = value;
}

}  // namespace pearl::device

#elif defined(PEARL_CUDA_KERNELS)

// PEARL_KERNEL_OF: by blocks of at most so many threads. PEARL_SHARED: memory of a block, not initialised;
// block_memory(): that which a launch gave it (LaunchShape::block_bytes); block_memory_of(): another block's of the cluster.
#ifdef PEARL_CUDA_ON_HOST
#define PEARL_KERNEL_OF(threads) static void
#define PEARL_SHARED(Type, name)                                              \
  static thread_local pearl::emulator::DeclaredMemory<Type> name##_of_blocks; \
  Type& name = name##_of_blocks.of_block()
#else
#define PEARL_KERNEL_OF(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define PEARL_SHARED(Type, name) __shared__ Type name
#endif
#define PEARL_KERNEL PEARL_KERNEL_OF(pearl::device::kMostLanes)

namespace pearl::device {

inline constexpr bool kLanesAreThreads = true;
inline constexpr unsigned kWarp = 32;

struct Place {
  std::uint64_t lane, lanes, row, rows, group, groups;
};

PEARL_DEVICE Place place_here() {
  return {threadIdx.x, blockDim.x, threadIdx.y, blockDim.y, blockIdx.x, gridDim.x};
}

PEARL_DEVICE void barrier(const Place&) { __syncthreads(); }

// A cluster: blocks that run at the same time and wait for each other. Devices without clusters have one block in each.
#if defined(PEARL_CUDA_ON_HOST)
inline unsigned cluster_rank() { return emulator::here->rank; }
inline unsigned cluster_size() { return emulator::here->cluster; }
inline void cluster_barrier() { emulator::wait_for_cluster(); }
#elif __CUDA_ARCH__ >= 900
PEARL_DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PEARL_DEVICE unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
PEARL_DEVICE void cluster_barrier() {
  if (cluster_size() == 1) return __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#else
PEARL_DEVICE unsigned cluster_rank() { return 0; }
PEARL_DEVICE unsigned cluster_size() { return 1; }
PEARL_DEVICE void cluster_barrier() { __syncthreads(); }
#endif

#if defined(PEARL_CUDA_ON_HOST)
inline float* block_memory_of(unsigned rank) { return emulator::memory_of(rank); }
inline float* block_memory() { return block_memory_of(emulator::here->rank); }
template <int bytes>
void start_copy(float* to, const float* from) {
  emulator::start_copy(to, from, bytes);
}
inline void end_copies() { emulator::end_copies(); }
inline void wait_for_copies(int later) { emulator::wait_for_copies(later); }
#else
PEARL_DEVICE float* block_memory() {
  extern __shared__ float4 pearl_block_memory[];
  return reinterpret_cast<float*>(pearl_block_memory);
}
// Once the cluster's blocks have waited for each other, so that all of them run. That block must not end before its memory
// has been used: they wait for each other again.
PEARL_DEVICE float* block_memory_of(unsigned rank) {
  float* there = block_memory();
#if __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(block_memory()), "r"(rank));
#else
  static_cast<void>(rank);
#endif
  return there;
}
// A thread's copies of 4 or 16 bytes to the block's memory, which other work need not wait for.
template <int bytes>
PEARL_DEVICE void start_copy(float* to, const float* from) {
#if __CUDA_ARCH__ >= 800
  const auto place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(bytes) : "memory");
#else
  static_cast<void>(to), static_cast<void>(from);  // not called: blocks are given no memory there
#endif
}
// Those that the thread has started since the last call are one group.
PEARL_DEVICE void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for the thread's groups of copies, but for the last `later`, or the last 7 of more.
PEARL_DEVICE void wait_for_copies(int later) {
#if __CUDA_ARCH__ >= 800
  switch (later) {  // the instruction takes a constant
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
    case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
    case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 7;" ::: "memory");
  }
#else
  static_cast<void>(later);
#endif
}
#endif

// The place of a thread whose work-group is its cluster: `row` and `rows` are those of its block.
PEARL_DEVICE Place place_in_cluster() {
  Place place = place_here();
  place.group /= cluster_size();
  place.groups /= cluster_size();
  return place;
}

// Combines the values of a block's threads, a warp at a time: the last warp may have fewer than 32.
template <class T, class Combine>
PEARL_DEVICE T combined(const Place& place, T value, Combine combine) {
  using OfWarps = T[kMostLanes / kWarp];
  PEARL_SHARED(OfWarps, of_warps);
  const auto thread = static_cast<unsigned>(place.row * place.lanes + place.lane);
  const auto threads = static_cast<unsigned>(place.rows * place.lanes);
  const unsigned warp = thread / kWarp, at = thread % kWarp, before = warp * kWarp;
  const unsigned here = threads - before < kWarp ? threads - before : kWarp;
  if (here == kWarp) {  // a constant mask: others cost more than the arithmetic
    for (unsigned step = kWarp / 2; step > 0; step /= 2) {
      const T other = __shfl_down_sync(~0u, value, step);
      if (at + step < kWarp) value = combine(value, other);
    }
  } else {
    for (unsigned step = kWarp / 2; step > 0; step /= 2) {
      const T other = __shfl_down_sync((1u << here) - 1, value, step);
      if (at + step < here) value = combine(value, other);
    }
  }
  __syncthreads();  // of_warps may still be read by a call before
  if (at == 0) of_warps[warp] = value;
  __syncthreads();
  value = of_warps[0];
  for (unsigned w = 1; w * kWarp < threads; ++w) value = combine(value, of_warps[w]);
  return value;
}

template <class T>
PEARL_DEVICE T largest(const Place& place, T value) {
  return combined(place, value, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
PEARL_DEVICE T least(const Place& place, T value) {
  return combined(place, value, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
PEARL_DEVICE T sum(const Place& place, T value) {
  return combined(place, value, [](T a, T b) { return a + b; });
}

template <class T>
class Atomic {
 public:
  PEARL_DEVICE explicit Atomic(T& value) : value_(&value) {}
  PEARL_DEVICE T load() const { return *static_cast<volatile T*>(value_); }
  PEARL_DEVICE void store(T value) const { *static_cast<volatile T*>(value_) = value; }
  PEARL_DEVICE T fetch_add(T value) const {
    if constexpr (sizeof(T) == 8)  // CUDA declares it for this type alone
      return atomicAdd(reinterpret_cast<unsigned long long*>(value_), static_cast<unsigned long long>(value));
    else
      return atomicAdd(value_, value);
  }
  PEARL_DEVICE T fetch_max(T value) const { return atomicMax(value_, value); }
  PEARL_DEVICE T fetch_min(T value) const { return atomicMin(value_, value); }

 private:
  T* value_;
};

// Races that do no harm. glance(): what is there by one load, while others may change it by atomics. write_alike(): others
// may write the same value.
#ifdef PEARL_CUDA_ON_HOST
using emulator::glance;
using emulator::write_alike;
#else
template <class T>
PEARL_DEVICE T glance(const T& at) {
  return at;
}
template <class T>
PEARL_DEVICE void write_alike(T& at, T value) {
  at = value;
}
#endif

}  // namespace pearl::device

#endif
