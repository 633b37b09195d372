// The scan of generalized advantage estimation in C++ for any machine.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pearl/gae.hpp"

#define PEARL_SIMD
#define PEARL_OP inline __attribute__((always_inline))

namespace pearl {
namespace {

constexpr int kMostLanes = 4;

#include "gae_kernels_body.hpp"

}  // namespace

const GaeKernels& plain_gae_kernels() {
  static constexpr GaeKernels kernels = {"plain", estimate};
  return kernels;
}

}  // namespace pearl
