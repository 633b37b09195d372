// The Data Storage's kernel: one launch, of any number of work-groups, copies rows of all columns.
#pragma once

#include "pearl/device/row_kernels.hpp"

using namespace pearl::device;

PEARL_KERNEL pearl_copy_rows(const RowCopy* columns, std::uint32_t column_count, const std::int64_t* from_rows,
                             std::uint64_t to_first, std::uint64_t to_rows, std::uint64_t count) {
  const Place place = place_here();
  copy_rows(columns, column_count, {from_rows, to_first, to_rows, count},
            {place.lane, place.lanes, place.group, place.groups});
}
