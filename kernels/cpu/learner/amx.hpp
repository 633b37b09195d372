// What kernels in AMX share: the shapes of tiles, and whether this process may use them.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 11
#define PEARL_AMX 1

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PEARL_AMX_SIMD __attribute__((target("amx-tile,amx-bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))

namespace pearl::learner::amx {

constexpr std::size_t kLanes = 16;  // rows of a tile, and float32 numbers in one
constexpr std::size_t kDepth = 32;  // bfloat16 numbers in a row: what a tile multiplies at once
constexpr std::size_t kParts = 3;   // bfloat16 numbers whose sum is a float32
constexpr std::size_t kTileNumbers = kDepth * kLanes;

// As the instruction reads it: palette 1, then bytes per row and rows of each tile.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Whether the processor has AMX and the system grants its registers to this process, and to threads it starts later.
bool granted();

}  // namespace pearl::learner::amx

#endif
