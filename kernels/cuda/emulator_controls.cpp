// Right and wrong kernels for tests of the emulator: it must tell them apart.
#include "emulator.hpp"

#include "pearl/device/group.hpp"

namespace {

constexpr int kThreads = 64;

// x[i] and x[63 - i] change places.
PEARL_KERNEL pearl_reverse(std::int32_t* x) {
  __shared__ std::int32_t held[kThreads];
  held[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = held[kThreads - 1 - threadIdx.x];
}

PEARL_KERNEL pearl_reverse_without_barrier(std::int32_t* x) {
  __shared__ std::int32_t held[kThreads];
  held[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = held[kThreads - 1 - threadIdx.x];
}

// The same through the block's own memory, by copies.
void reverse_by_copies(std::int32_t* x, bool in_time) {
  auto* const held = pearl::device::block_memory();
  pearl::device::start_copy<4>(held + threadIdx.x, reinterpret_cast<const float*>(x) + threadIdx.x);
  pearl::device::end_copies();
  if (in_time) pearl::device::wait_for_copies(0);
  __syncthreads();
  x[threadIdx.x] = std::bit_cast<std::int32_t>(held[kThreads - 1 - threadIdx.x]);
  pearl::device::wait_for_copies(0);
}

PEARL_KERNEL pearl_reverse_by_copies(std::int32_t* x) { reverse_by_copies(x, true); }

PEARL_KERNEL pearl_reverse_by_copies_waiting_late(std::int32_t* x) { reverse_by_copies(x, false); }

PEARL_KERNEL pearl_copy_beyond(std::int32_t* x) {
  pearl::device::start_copy<4>(pearl::device::block_memory() + kThreads, reinterpret_cast<const float*>(x));
}

PEARL_KERNEL pearl_copy_unaligned(std::int32_t* x) {
  pearl::device::start_copy<16>(pearl::device::block_memory() + 1, reinterpret_cast<const float*>(x));
}

PEARL_KERNEL pearl_copy_at_the_end(std::int32_t* x) {
  pearl::device::start_copy<4>(pearl::device::block_memory(), reinterpret_cast<const float*>(x));
}

PEARL_KERNEL pearl_half_a_barrier(std::int32_t* x) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  x[threadIdx.x] = 0;
}

PEARL_KERNEL pearl_two_barriers(std::int32_t* x) {
  if (threadIdx.x < kThreads / 2)
    __syncthreads();
  else
    __syncthreads();
  x[threadIdx.x] = 0;
}

// A block hands a number to the next, which relies on it; and one that relies on what no block has written.
PEARL_KERNEL pearl_chain_of_blocks(std::int32_t* x) {
  if (threadIdx.x == 0) x[blockIdx.x] = blockIdx.x == 0 ? 63 : x[blockIdx.x - 1] - 1;
}

PEARL_KERNEL pearl_unwritten_memory(std::int32_t* x) {
  PEARL_SHARED(std::int32_t, held);
  if (threadIdx.x < kThreads / 2) x[threadIdx.x] = held;
}

// The same as pearl_reverse by two blocks: one writes to the memory of the other.
void reverse_by_blocks(std::int32_t* x, bool meet, bool stay) {
  const bool sends = pearl::device::cluster_rank() == 1;
  if (meet) pearl::device::cluster_barrier();
  if (sends)
    pearl::device::block_memory_of(0)[kThreads - 1 - threadIdx.x] = static_cast<float>(x[threadIdx.x]);
  if (stay) pearl::device::cluster_barrier();
  if (!sends) x[threadIdx.x] = static_cast<std::int32_t>(pearl::device::block_memory()[threadIdx.x]);
}

PEARL_KERNEL pearl_reverse_by_blocks(std::int32_t* x) { reverse_by_blocks(x, true, true); }

PEARL_KERNEL pearl_reverse_by_blocks_that_do_not_meet(std::int32_t* x) { reverse_by_blocks(x, false, true); }

PEARL_KERNEL pearl_reverse_by_blocks_that_leave(std::int32_t* x) { reverse_by_blocks(x, true, false); }

// The lanes of a warp exchange neighbours' values.
void swap_in_warps(std::int32_t* x, bool wait) {
  __shared__ std::int32_t held[kThreads];
  held[threadIdx.x] = x[threadIdx.x];
  if (wait) __syncwarp();
  // A shuffle waits for the warp too, but orders no memory.
  const unsigned other = __shfl_xor_sync(~0u, threadIdx.x, 1, pearl::device::kWarp);
  x[threadIdx.x] = held[other];
}

PEARL_KERNEL pearl_swap(std::int32_t* x) { swap_in_warps(x, true); }

PEARL_KERNEL pearl_swap_without_waiting(std::int32_t* x) { swap_in_warps(x, false); }

// Every thread counts itself, and writes what it finds.
void count_threads(std::int32_t* x, bool wait) {
  const pearl::device::Place place = pearl::device::place_here();
  const std::int32_t before = x[threadIdx.x];
  pearl::device::barrier(place);
  const pearl::device::Atomic count(x[0]);
  count.fetch_add(1);
  if (wait) pearl::device::barrier(place);
  const std::int32_t found = wait ? x[0] : before;
  if (wait) pearl::device::barrier(place);
  x[threadIdx.x] = found;
}

PEARL_KERNEL pearl_count(std::int32_t* x) { count_threads(x, true); }

PEARL_KERNEL pearl_count_without_barrier(std::int32_t* x) { count_threads(x, false); }

// A thread writes a word, and others change a byte each: the result is x itself.
void change_bytes(std::int32_t* x, bool wait) {
  __shared__ std::int32_t held[kThreads / 4];
  auto* const bytes = reinterpret_cast<unsigned char*>(held);
  if (threadIdx.x % 4 == 0) held[threadIdx.x / 4] = -1;
  if (wait) __syncwarp();
  bytes[threadIdx.x] = static_cast<unsigned char>(x[threadIdx.x]);
  x[threadIdx.x] = bytes[threadIdx.x];
}

PEARL_KERNEL pearl_change_bytes(std::int32_t* x) { change_bytes(x, true); }

PEARL_KERNEL pearl_change_bytes_without_waiting(std::int32_t* x) { change_bytes(x, false); }

PEARL_KERNEL pearl_same_value(std::int32_t* x) { x[kThreads - 1] = 0; }

PEARL_KERNEL pearl_two_arguments(std::int32_t* x, float) { x[0] = 0; }

using pearl::emulator::call;

const pearl::emulator::Registered registered{{
    {"controls", "", "pearl_chain_of_blocks", &call<pearl_chain_of_blocks>},
    {"controls", "", "pearl_change_bytes", &call<pearl_change_bytes>},
    {"controls", "", "pearl_change_bytes_without_waiting", &call<pearl_change_bytes_without_waiting>},
    {"controls", "", "pearl_copy_at_the_end", &call<pearl_copy_at_the_end>},
    {"controls", "", "pearl_copy_beyond", &call<pearl_copy_beyond>},
    {"controls", "", "pearl_copy_unaligned", &call<pearl_copy_unaligned>},
    {"controls", "", "pearl_count", &call<pearl_count>},
    {"controls", "", "pearl_count_without_barrier", &call<pearl_count_without_barrier>},
    {"controls", "", "pearl_half_a_barrier", &call<pearl_half_a_barrier>},
    {"controls", "", "pearl_reverse", &call<pearl_reverse>},
    {"controls", "", "pearl_reverse_by_blocks", &call<pearl_reverse_by_blocks>},
    {"controls", "", "pearl_reverse_by_blocks_that_do_not_meet", &call<pearl_reverse_by_blocks_that_do_not_meet>},
    {"controls", "", "pearl_reverse_by_blocks_that_leave", &call<pearl_reverse_by_blocks_that_leave>},
    {"controls", "", "pearl_reverse_by_copies", &call<pearl_reverse_by_copies>},
    {"controls", "", "pearl_reverse_by_copies_waiting_late", &call<pearl_reverse_by_copies_waiting_late>},
    {"controls", "", "pearl_reverse_without_barrier", &call<pearl_reverse_without_barrier>},
    {"controls", "", "pearl_same_value", &call<pearl_same_value>},
    {"controls", "", "pearl_swap", &call<pearl_swap>},
    {"controls", "", "pearl_swap_without_waiting", &call<pearl_swap_without_waiting>},
    {"controls", "", "pearl_two_arguments", &call<pearl_two_arguments>},
    {"controls", "", "pearl_two_barriers", &call<pearl_two_barriers>},
    {"controls", "", "pearl_unwritten_memory", &call<pearl_unwritten_memory>},
}};

}  // namespace
