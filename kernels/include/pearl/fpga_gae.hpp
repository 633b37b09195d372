// Generalized advantage estimation as a pipeline on an FPGA: HEPPO-GAE's processing elements (Sec. III-B, III-C; Fig. 4,
// 5), one in each row. A row takes every rows-th environment, and scans one after the other, backwards in time.
//
//   load (host memory, decodes) -> processing element -> store (host memory)
//
// An element starts a step in each cycle. The sum A_t = delta_t + C A_{t+1} would not allow that, since a multiplication
// and an addition take several cycles: each step would wait for the one before. With `lookahead` k, A_t needs only
// A_{t+k}, which has k cycles (Eq. 10, 11):
//
//   A_t = C^k A_{t+k} + C^{k-1} delta_{t+k-1} + ... + C delta_{t+1} + delta_t
//
// Of these terms, those beyond the end of an episode are 0.
#pragma once

#include <cstdint>

#include "pearl/fpga_pipes.hpp"

namespace pearl::fpga {

enum class GaeKind : std::uint8_t {
  factors,  // reward: gamma; value: C, that is gamma * lambda
  begin,    // of an environment; value: that of the observation after the last step
  step,
  stop,
};

// The input of a processing element.
struct GaeStep {
  float reward;
  float value;
  GaeKind kind;
  bool goes_on;  // no episode ended after the step
};

// Its output for each step.
struct GaeResult {
  float advantage;
  float to_go;  // the return
};

// A request of the host. Only `step` has sizes and numbers.
struct GaeCommand {
  GaeKind kind;
  std::uint8_t number_bytes;  // of rewards and of values: 4 for float32, 1 or 2 for codes
  std::uint32_t horizon;
  std::uint32_t envs;
  float gamma, decay;
  float reward_offset, reward_scale;
  float value_offset, value_scale;
};

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)

inline float gae_number(const std::uint8_t* numbers, unsigned bytes, float offset, float scale, std::uint64_t i) {
  if (bytes == 1) return offset + scale * static_cast<float>(numbers[i]);
  if (bytes == 2) return offset + scale * static_cast<float>(reinterpret_cast<const std::uint16_t*>(numbers)[i]);
  return reinterpret_cast<const float*>(numbers)[i];
}

// Sends the steps of a row's environments, the last step of each first.
template <unsigned row, unsigned rows, class Out>
void load_steps(const GaeCommand& command, const std::uint8_t* rewards, const std::uint8_t* values, const float* bonus,
                const float* last_values, const std::uint8_t* ends) {
  if (command.kind != GaeKind::step) {
    Out::write(GaeStep{command.gamma, command.decay, command.kind, false});
    return;
  }
  for (std::uint32_t env = row; env < command.envs; env += rows) {
    Out::write(GaeStep{0.0f, last_values[env], GaeKind::begin, false});
    for (std::uint32_t t = command.horizon; t-- > 0;) {
      const std::uint64_t i = static_cast<std::uint64_t>(t) * command.envs + env;
      GaeStep step{};
      step.reward = gae_number(rewards, command.number_bytes, command.reward_offset, command.reward_scale, i);
      if (bonus != nullptr) step.reward += bonus[i];
      step.value = gae_number(values, command.number_bytes, command.value_offset, command.value_scale, i);
      step.kind = GaeKind::step;
      step.goes_on = ends[i] == 0;
      Out::write(step);
    }
  }
}

template <int lookahead, class In, class Out>
void processing_element() {
  float gamma = 0.0f, powers[lookahead + 1];  // C^0 to C^k
  float next_value = 0.0f;
  // Of steps t, t + 1, ...: registers that move by one with each step. Beyond the horizon all are 0.
  float deltas[lookahead], advantages[lookahead];
  bool goes_on[lookahead];
  while (true) {
    const GaeStep step = In::read();
    if (step.kind == GaeKind::stop) return;
    if (step.kind == GaeKind::factors) {
      gamma = step.reward;
      powers[0] = 1.0f;
#pragma unroll
      for (int i = 0; i < lookahead; ++i) powers[i + 1] = powers[i] * step.value;
      continue;
    }
    if (step.kind == GaeKind::begin) {
      next_value = step.value;
#pragma unroll
      for (int i = 0; i < lookahead; ++i) {
        deltas[i] = 0.0f;
        advantages[i] = 0.0f;
        goes_on[i] = false;
      }
      continue;
    }
#pragma unroll
    for (int i = lookahead - 1; i > 0; --i) {
      deltas[i] = deltas[i - 1];
      goes_on[i] = goes_on[i - 1];
    }
    deltas[0] = step.reward + (step.goes_on ? gamma * next_value : 0.0f) - step.value;
    goes_on[0] = step.goes_on;
    next_value = step.value;

    float sum = deltas[0];
    bool reached = true;  // no episode ended between step t and the term's
#pragma unroll
    for (int i = 1; i < lookahead; ++i) {
      reached = reached && goes_on[i - 1];
      sum += reached ? powers[i] * deltas[i] : 0.0f;
    }
    reached = reached && goes_on[lookahead - 1];
    const float advantage = sum + (reached ? powers[lookahead] * advantages[lookahead - 1] : 0.0f);
#pragma unroll
    for (int i = lookahead - 1; i > 0; --i) advantages[i] = advantages[i - 1];
    advantages[0] = advantage;
    Out::write(GaeResult{advantage, step.value + advantage});
  }
}

// Writes the results where the host wants them. Rewards and values may lie there: each was read before its result is made.
template <unsigned row, unsigned rows, class In>
void store_results(const GaeCommand& command, float* advantages, float* returns) {
  for (std::uint32_t env = row; env < command.envs; env += rows)
    for (std::uint32_t t = command.horizon; t-- > 0;) {
      const std::uint64_t i = static_cast<std::uint64_t>(t) * command.envs + env;
      const GaeResult result = In::read();
      advantages[i] = result.advantage;
      returns[i] = result.to_go;
    }
}

#endif

}  // namespace pearl::fpga
