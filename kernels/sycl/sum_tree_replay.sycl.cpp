// The Replay Manager's kernels, each run by one work-group.
#include <sycl/sycl.hpp>

#include "pearl/device_replay.hpp"
#include "pearl/device_rows.hpp"

namespace syclext = sycl::ext::oneapi;
namespace experimental = sycl::ext::oneapi::experimental;

using namespace pearl::device;

#define PEARL_KERNEL extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::nd_range_kernel<2>)) void

inline Lanes lanes_here() {
  const auto item = syclext::this_work_item::get_nd_item<2>();
  return {item.get_group(), item.get_local_id(1), item.get_local_range(1)};
}

PEARL_KERNEL pearl_sample(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                          std::uint64_t call, std::int64_t beta_q28) {
  sample(*replay, lanes_here(), *batch, count, call, beta_q28);
}

// Also gathers the drawn rows, where they are few enough for one work-group.
PEARL_KERNEL pearl_sample_rows(const ReplayMemory* replay, const SampledBatch* batch, std::uint64_t count,
                               std::uint64_t call, std::int64_t beta_q28, const RowCopy* columns,
                               std::uint32_t column_count) {
  const Lanes lanes = lanes_here();
  sample(*replay, lanes, *batch, count, call, beta_q28);
  barrier(lanes);
  copy_rows(columns, column_count, {batch->indices, 0, count, count}, {lanes.first, lanes.count, 0, 1});
}

PEARL_KERNEL pearl_insert(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, std::uint32_t highest,
                          std::uint64_t infinite, std::uint64_t inserts) {
  insert(*replay, lanes_here(), indices, priorities, generations, count, highest, infinite, inserts);
}

PEARL_KERNEL pearl_update(const ReplayMemory* replay, const std::int64_t* indices, const std::uint32_t* priorities,
                          const std::uint32_t* generations, std::uint64_t count, UpdateRefusal* refusal) {
  update(*replay, lanes_here(), indices, priorities, generations, count, *refusal);
}

PEARL_KERNEL pearl_retrieve(const ReplayMemory* replay, const std::int64_t* indices, std::uint32_t* priorities,
                            std::uint64_t count) {
  const Lanes lanes = lanes_here();
  for (std::uint64_t i = lanes.first; i < count; i += lanes.count) {
    const auto slot = static_cast<std::uint64_t>(indices[i]);
    const ReplaySlot held = replay->slots[slot];
    priorities[i] = replay->prioritized ? held.priority : (held.generation != 0 ? 0x3F800000u : 0u);  // 1 or 0
  }
}

PEARL_KERNEL pearl_sum_all(const ReplayMemory* replay) { sum_all(*replay, lanes_here()); }
