// Sources of autorun programs, generated for one design; what they are made of stands in kernels/include/pearl/fpga_*.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "autorun_program.hpp"

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

// Bridges of replay_program; the last where a Learner is beside the tree.
enum ReplayBridge : std::size_t { kFeed, kCollect, kFinish };

// On an emulator, whose stages take turns on the host's cores, longer pipes mean fewer turns; a board pays for them in
// memory.
inline constexpr int kEmulatedPipeItems = 1024;

// What every program begins with.
extern const char* const kAutorunPreamble;

// What stands beside the tree in its program: headers, declarations and stages, and the type that feeds on its answers.
struct BesideReplay {
  std::string headers, text, learner = "None";
};

AutorunProgram replay_program(const TreeShape& shape, int pipe_items, const BesideReplay& beside = {});

// The program's text for a compiler that makes one file of host and device code (kernels/sycl/board/): kernels are
// functions, and `launch_stages(queues)` launches the stages, each on a queue of its own.
std::string ahead_of_time(const AutorunProgram& program);

}  // namespace pearl::device
