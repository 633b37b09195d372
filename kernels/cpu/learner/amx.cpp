#include "pearl/learner/tiles.hpp"

#include "amx_blocks.hpp"

#if defined(PEARL_AMX)

#include <sys/syscall.h>
#include <unistd.h>

#include "pearl/aligned.hpp"

namespace pearl::learner {
namespace amx {
namespace {

// A thread's tiles: whether they are set up, as kWholeTiles, and whether they stay so between products.
struct Tiles {
  bool set = false, whole = false, kept = false;
};
thread_local Tiles tiles;

}  // namespace

bool granted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned int a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool has_tiles = (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0;
  return has_tiles && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

std::uint16_t* memory(std::size_t numbers) {
  thread_local AlignedArray<std::uint16_t> array;
  if (array.size() < numbers) array = AlignedArray<std::uint16_t>(numbers);
  return array.data();
}

PEARL_AMX_SIMD void set_up_tiles(const TileShapes& shapes) {
  Tiles& own = tiles;
  const bool whole = &shapes == &kWholeTiles;
  if (whole && own.whole) return;
  _tile_loadconfig(&shapes);
  own.whole = whole;
  own.set = true;
}

PEARL_AMX_SIMD void give_up_tiles() {
  Tiles& own = tiles;
  if (own.kept || !own.set) return;
  _tile_release();
  own.set = own.whole = false;
}

}  // namespace amx

KeptTiles::KeptTiles() { amx::tiles.kept = true; }
KeptTiles::~KeptTiles() {
  amx::tiles.kept = false;
  amx::give_up_tiles();
}

}  // namespace pearl::learner

#else

namespace pearl::learner {

KeptTiles::KeptTiles() = default;
KeptTiles::~KeptTiles() = default;

}  // namespace pearl::learner

#endif
