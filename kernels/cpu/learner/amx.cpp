#include "amx_blocks.hpp"

#if defined(PEARL_AMX)

#include <sys/syscall.h>
#include <unistd.h>

#include "pearl/aligned.hpp"

namespace pearl::learner::amx {

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

}  // namespace pearl::learner::amx

#endif
