// The Data Storage's kernel: one launch, of any number of work-groups, copies rows of all columns.
#include <sycl/sycl.hpp>

#include "pearl/device_rows.hpp"

namespace syclext = sycl::ext::oneapi;
namespace experimental = sycl::ext::oneapi::experimental;

using namespace pearl::device;

extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::nd_range_kernel<2>)) void pearl_copy_rows(
    const RowCopy* columns, std::uint32_t column_count, const std::int64_t* from_rows, std::uint64_t to_first,
    std::uint64_t to_rows, std::uint64_t count) {
  const auto item = syclext::this_work_item::get_nd_item<2>();
  copy_rows(columns, column_count, {from_rows, to_first, to_rows, count},
            {item.get_local_id(1), item.get_local_range(1), item.get_group(1), item.get_group_range(1)});
}
