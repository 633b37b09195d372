// Plans a block's own memory for a tape, on devices where blocks have such memory: first values of its transitions,
// then matrices of weights, each loaded while earlier instructions run.
//
// The blocks of a cluster share the features of a layer, and each holds what its own need: of a linear operation the
// rows of its neurons and their biases, of slope_linear the columns of its inputs. Memory is handed out in the tape's
// order, and again from the start once it is used up. Matrices that are still there are used again; a single block,
// whose matrices are whole, uses them in the backward pass too.
#pragma once

#include <cstddef>
#include <vector>

#include "pearl/tape.hpp"

namespace pearl::device {

// `features`: values at the start of the memory: all of the arena's, which stay until the tape's end, or so many that
// the input of any matrix fits, to which each operation copies its own; 0 if they are read where they are.
struct BlockMemory {
  std::size_t features = 0, bytes = 0;
};

// Plans the memory of each of `blocks` in a cluster, at most `bytes`, for tapes with arenas of `arena` features, and
// writes to each instruction:
// - `held`: where its matrix lies, in floats; kNone if it is read from the vector of parameters;
// - kLoads: the matrix is loaded for it, not for one before;
// - `loads`: how many loads of the tape must have arrived before it runs;
// - `ahead`: the loads of so many instructions, from the first, are started before it runs.
BlockMemory plan_block_memory(const std::vector<std::vector<tape::Instruction>*>& tapes, std::size_t arena,
                              std::size_t blocks, std::size_t bytes);

}  // namespace pearl::device
