// Generalized advantage estimation: every variant gives the bits of a plain loop, and touches nothing beyond its arrays.
#include "pearl/gae.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "pearl/errors.hpp"

namespace {

using namespace pearl;

// Around the widths of vectors, and of the vectors that are scanned together.
const std::vector<std::size_t> kEnvs = {0,  1,  2,  3,  4,  5,  7,  8,  9,  15, 16, 17, 31,
                                        33, 48, 63, 64, 65, 79, 80, 81, 96, 97, 129, 300, 512, 1024, 1536};
const std::vector<std::size_t> kHorizons = {0, 1, 2, 7, 33};

// What a call reads and writes. Vectors are exactly as long as needed: the sanitizer sees every access beyond.
template <class Number>
struct Rollout {
  Rollout(std::size_t horizon, std::size_t envs, unsigned seed, int ends_in_ten, bool with_bonus) : random(seed) {
    const std::size_t count = horizon * envs;
    std::normal_distribution<float> normal;
    for (auto* floats : {&bonus, &advantages, &returns}) {
      floats->resize(count);
      for (float& value : *floats) value = normal(random);
    }
    for (auto* numbers : {&rewards, &values}) {
      numbers->resize(count);
      for (Number& number : *numbers) number = static_cast<Number>(std::is_integral_v<Number> ? random() : normal(random));
    }
    for (std::size_t i = 0; i < envs; ++i) last_values.push_back(normal(random));
    for (std::size_t i = 0; i < count; ++i) ends.push_back(random() % 10 < static_cast<unsigned>(ends_in_ten) ? 1 + random() % 255 : 0);
    call = {horizon, envs, sizeof(Number), {rewards.data(), -1.5f, 0.37f}, {values.data(), 0.25f, 1.7f},
            with_bonus ? bonus.data() : nullptr, last_values.data(), ends.data(), advantages.data(), returns.data()};
  }

  float number(const GaeNumbers& numbers, std::size_t i) const {
    const auto raw = static_cast<float>(static_cast<const Number*>(numbers.data)[i]);
    return std::is_integral_v<Number> ? numbers.offset + numbers.scale * raw : raw;
  }

  // The plain loop, into the two arrays.
  void expect(const GaeFactors& factors, std::vector<float>& expected_advantages, std::vector<float>& expected_returns) const {
    expected_advantages.resize(call.count());
    expected_returns.resize(call.count());
    for (std::size_t env = 0; env < call.envs; ++env) {
      float next_value = last_values[env], advantage = 0.0f;
      for (std::size_t t = call.horizon; t-- > 0;) {
        const std::size_t i = t * call.envs + env;
        const float value = number(call.values, i);
        float reward = number(call.rewards, i);
        if (call.bonus != nullptr) reward += call.bonus[i];
        const float bootstrap = ends[i] == 0 ? factors.gamma * next_value : 0.0f;
        const float carried = ends[i] == 0 ? factors.decay * advantage : 0.0f;
        advantage = reward + bootstrap - value + carried;
        expected_advantages[i] = advantage;
        expected_returns[i] = value + advantage;
        next_value = value;
      }
    }
  }

  std::mt19937 random;
  std::vector<Number> rewards, values;
  std::vector<float> bonus, last_values, advantages, returns;
  std::vector<std::uint8_t> ends;
  GaeCall call;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
}

template <class Number>
void results_are_those_of_the_plain_loop(const GaeKernels& kernels) {
  const GaeFactors factors = GaeFactors::of(0.99, 0.95);
  std::vector<float> advantages, returns;
  unsigned seed = 0;
  for (const std::size_t envs : kEnvs)
    for (const std::size_t horizon : kHorizons)
      for (const int ends_in_ten : {0, 2, 10}) {
        const bool bonus = std::is_integral_v<Number> && seed % 2 == 1;
        Rollout<Number> rollout(horizon, envs, ++seed, ends_in_ten, bonus);
        rollout.expect(factors, advantages, returns);
        kernels.estimate(factors, rollout.call);
        CHECK(same_bits(rollout.advantages, advantages));
        CHECK(same_bits(rollout.returns, returns));
      }
}

void results_may_overwrite_what_they_are_made_of(const GaeKernels& kernels) {
  const GaeFactors factors = GaeFactors::of(0.9, 1.0);
  std::vector<float> advantages, returns;
  for (const std::size_t envs : kEnvs) {
    Rollout<float> rollout(33, envs, 7, 1, false);
    rollout.expect(factors, advantages, returns);
    rollout.call.advantages = rollout.rewards.data();
    rollout.call.returns = rollout.values.data();
    kernels.estimate(factors, rollout.call);
    CHECK(same_bits(rollout.rewards, advantages));
    CHECK(same_bits(rollout.values, returns));
  }
}

void nothing_passes_the_end_of_an_episode(const GaeKernels& kernels) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::size_t envs : kEnvs) {
    if (envs == 0) continue;
    Rollout<float> rollout(4, envs, 3, 0, false);
    for (std::size_t env = 0; env < envs; ++env) {
      rollout.ends[2 * envs + env] = 1;  // after step 2
      rollout.values[3 * envs + env] = infinity;
      rollout.last_values[env] = std::nanf("");
    }
    kernels.estimate(GaeFactors::of(0.99, 0.95), rollout.call);
    for (std::size_t i = 0; i < 3 * envs; ++i) CHECK(std::isfinite(rollout.advantages[i]) && std::isfinite(rollout.returns[i]));
  }
}

void factors_outside_their_range_are_refused() {
  for (const double wrong : {-0.1, 1.1, std::nan("")}) {
    CHECK(throws<ConfigurationError>([&] { GaeFactors::of(wrong, 0.95); }));
    CHECK(throws<ConfigurationError>([&] { GaeFactors::of(0.99, wrong); }));
  }
}

}  // namespace

int main() {
  CHECK(gae_kernel_variants().front() == "plain");
  for (const std::string& name : gae_kernel_variants()) {
    select_gae_kernels(name);
    const GaeKernels& kernels = gae_kernels();
    CHECK(kernels.name == name);
    results_are_those_of_the_plain_loop<float>(kernels);
    results_are_those_of_the_plain_loop<std::uint8_t>(kernels);
    results_are_those_of_the_plain_loop<std::uint16_t>(kernels);
    results_may_overwrite_what_they_are_made_of(kernels);
    nothing_passes_the_end_of_an_episode(kernels);
  }
  CHECK(throws<ConfigurationError>([] { select_gae_kernels("sse9"); }));
  factors_outside_their_range_are_refused();
}
