// Generates autorun programs for one design. Their stages are in kernels/include/pearl/fpga_*.
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

  // The shallowest tree with that many slots. Throws ReplayError for a tree that no FPGA program supports.
  static TreeShape of(std::int64_t capacity, unsigned fanout);
  // Bits of a node and number of nodes, by level from the root.
  std::vector<unsigned> bits() const;
  std::vector<std::uint32_t> nodes() const;
};

// Bridges of replay_program; kFinish only with a Learner.
enum ReplayBridge : std::size_t { kFeed, kCollect, kFinish };

// On the emulator, stages take turns on the host's cores: longer pipes mean fewer turns. On a board they cost memory.
inline constexpr int kEmulatedPipeItems = 1024;

// The beginning of every program.
extern const char* const kAutorunPreamble;

// A Learner in the tree's program: headers, declarations and stages, and the type that takes the tree's answers.
struct JoinedLearner {
  std::string headers, text, type = "None";
};

AutorunProgram replay_program(const TreeShape& shape, int pipe_items, const JoinedLearner& learner = {});

// The program's text for a compiler of combined host and device code (kernels/sycl/board/): kernels are functions, and
// `launch_stages(queues)` launches each stage on its own queue.
std::string ahead_of_time(const AutorunProgram& program);

}  // namespace pearl::device
