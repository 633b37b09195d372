// Views of caller-supplied memory that other processes map too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "pearl/errors.hpp"

namespace pearl {

// The first words of every shared structure: its type and version, and its shape.
struct SharedHeader {
  std::atomic<std::uint64_t> magic;
  std::uint64_t shape[3];
};

// The largest shared structure, in bytes: sums and products of sizes up to this do not overflow.
inline constexpr std::size_t kMostSharedBytes = std::size_t{1} << 46;

// count * item_bytes; throws QueueError if no memory could hold that.
inline std::size_t shared_bytes(const char* what, std::size_t count, std::size_t item_bytes) {
  if (item_bytes > kMostSharedBytes || count > kMostSharedBytes / (item_bytes + 128))
    throw QueueError(std::string(what) + " of " + std::to_string(count) + " times " + std::to_string(item_bytes) +
                     " bytes fits no memory.");
  return count * item_bytes;
}

inline void* check_region(const char* what, void* memory, std::size_t nbytes, std::size_t needed) {
  if (nbytes < needed)
    throw QueueError(std::string(what) + " needs a buffer of " + std::to_string(needed) + " bytes; found " +
                     std::to_string(nbytes) + ".");
  if (reinterpret_cast<std::uintptr_t>(memory) % 8 != 0)
    throw QueueError(std::string(what) + " needs a buffer aligned to 8 bytes, such as an mmap.");
  return memory;
}

inline void check_header(const char* what, const SharedHeader& header, std::uint64_t magic,
                         const std::uint64_t (&shape)[3]) {
  const std::uint64_t found = header.magic.load(std::memory_order_acquire);
  if (found != magic)
    throw QueueError(std::string(what) + " was not created in this buffer, or by another version of PEARL (mark " +
                     std::to_string(found) + ").");
  for (int i = 0; i < 3; ++i)
    if (header.shape[i] != shape[i])
      throw QueueError(std::string(what) + " in this buffer has another shape: expected " + std::to_string(shape[i]) +
                       ", found " + std::to_string(header.shape[i]) + ".");
}

}  // namespace pearl
