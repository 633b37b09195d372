#include "pearl/device/sycl.hpp"

#include "pearl/device/column_store_entries.hpp"
