// Sources of autorun programs, generated for one design; what they are made of stands in kernels/include/pearl/fpga_*.
#pragma once

#include <cstdint>
#include <vector>

#include "autorun.hpp"

namespace pearl::device {

// The sum tree of an FPGA's Replay Manager.
struct TreeShape {
  std::uint32_t capacity;
  unsigned shift;  // log2 of the fanout
  unsigned depth;  // levels below the root

  // Of the least depth that has the slots. Throws ReplayError for what no FPGA program is generated for.
  static TreeShape of(std::int64_t capacity, unsigned fanout);
  // Of a node, the root's first.
  std::vector<unsigned> bits() const;
  std::vector<std::uint32_t> nodes() const;
};

// Bridges of replay_program.
enum ReplayBridge : std::size_t { kFeed, kCollect };

// On an emulator, whose stages take turns on the host's cores, longer pipes mean fewer turns; a board pays for them in
// memory.
inline constexpr int kEmulatedPipeItems = 1024;

AutorunProgram replay_program(const TreeShape& shape, int pipe_items);

}  // namespace pearl::device
