// Measures a launch, and tests whether kernels compile and run at all.
#include <sycl/sycl.hpp>

namespace syclext = sycl::ext::oneapi;
namespace experimental = sycl::ext::oneapi::experimental;

// x[i] += 1
extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::nd_range_kernel<2>)) void pearl_increment(unsigned* x) {
  const auto item = syclext::this_work_item::get_nd_item<2>();
  x[item.get_global_id(1)] += 1;
}
