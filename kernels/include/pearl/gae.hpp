// Generalized advantage estimation (pearl/rollout/gae.py): its arguments, on every device, and its scan on the CPU, which
// runs backwards in time over all environments at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pearl {

struct GaeFactors {
  float gamma;
  float decay;  // gamma * lambda

  // Throws ConfigurationError unless both lie in [0, 1].
  static GaeFactors of(double gamma, double gae_lambda);
};

// Rewards or values: float32, or codes that stand for offset + scale * code.
struct GaeNumbers {
  const void* data;
  float offset = 0.0f, scale = 1.0f;
};

// One estimation. Arrays are (horizon, envs), one row for each step. float32 rewards and values may lie where the
// advantages and returns go.
struct GaeCall {
  std::size_t horizon, envs;
  std::size_t number_bytes;  // of rewards and of values: 4 for float32, 1 or 2 for codes
  GaeNumbers rewards, values;
  const float* bonus;        // added to the rewards; null: nothing is
  const float* last_values;  // (envs,): of the observations after the last step
  const std::uint8_t* ends;  // not 0 where an episode ended after the step
  float* advantages;
  float* returns;

  std::size_t count() const { return horizon * envs; }
};

// The scan for several instruction sets. Every variant gives the bits of the reference in NumPy.
struct GaeKernels {
  const char* name;
  void (*estimate)(const GaeFactors& factors, const GaeCall& call);
};

// As for the Replay Manager's kernels (replay_kernels.hpp).
const GaeKernels& gae_kernels();
std::vector<std::string> gae_kernel_variants();
void select_gae_kernels(const std::string& name);

const GaeKernels& plain_gae_kernels();
// x86-64 only; null if this machine lacks the instruction set.
const GaeKernels* avx2_gae_kernels();
const GaeKernels* avx512_gae_kernels();

}  // namespace pearl
