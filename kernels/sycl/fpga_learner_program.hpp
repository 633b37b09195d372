// Generates the autorun programs of an FPGA's Learner, alone or together with a Replay Manager. Their stages are in
// kernels/include/pearl/fpga_learner.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "autorun_program.hpp"
#include "fpga_program.hpp"
#include "pearl/device/network_source.hpp"
#include "pearl/tape.hpp"

namespace pearl::device {

// One linear layer with its activation.
struct LayerShape {
  int inputs = 0, outputs = 0;
  std::ptrdiff_t weight = 0, bias = learner::kNone;  // places in its network's vector
  tape::Activation activation = tape::Activation::none;
  int unroll = 16;  // UF: parallel multiply-accumulates in each of FP, BP and GA, a power of two

  bool operator==(const LayerShape&) const = default;
};

// The design of a program.
struct LearnerShape {
  std::vector<std::vector<LayerShape>> networks;  // DQN: one; else the actor, then one or two critics
  bool actor_critic = false, double_q = false;
  bool stochastic = false, learns_temperature = false;  // SAC
  int observations = 0, actions = 0;
  int copies = 1;          // DP of PEARL Sec. V-B
  std::uint32_t rows = 0;  // the largest batch
  int rules[3] = {};       // tape::Rule of the critics, or DQN's network, of the policy and of the temperature

  int items() const { return (static_cast<int>(rows) + copies - 1) / copies; }  // PI: of one copy, at most
  bool operator==(const LearnerShape&) const = default;
};

// Throws LearnerError, which names the operation, unless the network is a chain of linear layers, each followed by
// ReLU, tanh or nothing.
std::vector<LayerShape> chain_of(const NetworkSource& network);

// Bridges of learner_program.
enum LearnerBridge : std::size_t { kSubmit, kResolve };
AutorunProgram learner_program(const LearnerShape& shape, int pipe_items);

// Learner and Replay Manager on one FPGA.
AutorunProgram training_program(const TreeShape& tree, const LearnerShape& shape, int pipe_items);

}  // namespace pearl::device
