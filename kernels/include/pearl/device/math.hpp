// Mathematics in kernels, and for which kind of device these are compiled: PEARL_SYCL_KERNELS, PEARL_CUDA_KERNELS, or
// neither in host code. PEARL_CUDA_ON_HOST compiles CUDA's kernels for the host, see kernels/cuda/emulator.hpp.
#pragma once

#include "pearl/device/portable.hpp"

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)
#define PEARL_SYCL_KERNELS
#elif defined(__CUDACC__) || defined(PEARL_CUDA_ON_HOST)
#define PEARL_CUDA_KERNELS
#endif

#ifdef PEARL_SYCL_KERNELS

namespace pearl::device::math {
using sycl::clamp;
using sycl::copysign;
using sycl::exp;
using sycl::fabs;
using sycl::fma;
using sycl::fmax;
using sycl::fmin;
using sycl::log1p;
using sycl::sqrt;
using sycl::tanh;
}  // namespace pearl::device::math

#elif defined(PEARL_CUDA_KERNELS)

namespace pearl::device::math {
PEARL_DEVICE float copysign(float x, float sign) { return copysignf(x, sign); }
PEARL_DEVICE float exp(float x) { return expf(x); }
PEARL_DEVICE float fabs(float x) { return fabsf(x); }
PEARL_DEVICE float fma(float a, float b, float c) { return fmaf(a, b, c); }
PEARL_DEVICE float fmax(float a, float b) { return fmaxf(a, b); }
PEARL_DEVICE float fmin(float a, float b) { return fminf(a, b); }
PEARL_DEVICE float clamp(float x, float low, float high) { return fminf(fmaxf(x, low), high); }
PEARL_DEVICE float log1p(float x) { return log1pf(x); }
PEARL_DEVICE float sqrt(float x) { return sqrtf(x); }
PEARL_DEVICE float tanh(float x) { return tanhf(x); }
}  // namespace pearl::device::math

#endif

#if defined(PEARL_SYCL_KERNELS) || defined(PEARL_CUDA_KERNELS)
#define PEARL_KERNELS
#endif
