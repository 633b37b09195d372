// Shared by host and kernels on every device. Marks of functions for CUDA's compilers; others need none. PEARL_FN: runs
// on the host and in kernels. PEARL_DEVICE: only in kernels. PEARL_TABLE: a constant array that both read.
#pragma once

namespace pearl::device {

inline constexpr unsigned kMostLanes = 512;  // of a work-group
inline constexpr unsigned kThreadTeam = 16;  // lanes of a team (team_kernels.hpp) where a lane is a thread

}  // namespace pearl::device

#ifdef __CUDACC__
#define PEARL_FN __host__ __device__ __forceinline__
#define PEARL_DEVICE __device__ __forceinline__
#else
#define PEARL_FN inline
#define PEARL_DEVICE inline
#endif
#ifdef __CUDA_ARCH__
#define PEARL_TABLE static __constant__ const
#else
#define PEARL_TABLE inline constexpr
#endif

namespace pearl::device {

// The features of a block, one of `blocks` that share `width` of them: fours, for each part of a row to consist of them.
PEARL_FN int share_of(int width, int blocks) { return (width + 4 * blocks - 1) / (4 * blocks) * 4; }

}  // namespace pearl::device
