// Generalized advantage estimation (pearl/gae.hpp): a lane for each environment, backwards in time.
#pragma once

#include "pearl/device/group.hpp"

namespace pearl::device {

inline constexpr unsigned kStepsAtOnce = 8;  // read before any is computed: one wait for the memory, not one for each

// Rewards or values as a lane reads them.
struct GaeFloats {
  const void* data;
  float offset, scale;  // unused
  PEARL_DEVICE float at(std::uint64_t i) const { return static_cast<const float*>(data)[i]; }
};

template <class Code>
struct GaeDecoded {
  const void* data;
  float offset, scale;
  PEARL_DEVICE float at(std::uint64_t i) const {
    return offset + scale * static_cast<float>(static_cast<const Code*>(data)[i]);
  }
};

template <class Source>
PEARL_DEVICE void scan_backwards(std::uint64_t horizon, std::uint64_t envs, const Source& rewards,
                                 const Source& values, const float* bonus, const float* last_values,
                                 const std::uint8_t* ends, float* advantages, float* returns, float gamma,
                                 float decay) {
  const Place place = place_here();
  for (std::uint64_t env = place.group * place.lanes + place.lane; env < envs; env += place.groups * place.lanes) {
    float next_value = last_values[env], advantage = 0.0f;
    for (std::uint64_t left = horizon; left > 0; left -= left < kStepsAtOnce ? left : kStepsAtOnce) {
      float reward[kStepsAtOnce], value[kStepsAtOnce];
      bool goes_on[kStepsAtOnce];
      for (unsigned k = 0; k < kStepsAtOnce; ++k) {
        const std::uint64_t i = (k < left ? left - 1 - k : 0) * envs + env;
        reward[k] = rewards.at(i);
        if (bonus != nullptr) reward[k] += bonus[i];
        value[k] = values.at(i);
        goes_on[k] = ends[i] == 0;
      }
      for (unsigned k = 0; k < kStepsAtOnce; ++k) {
        if (k >= left) break;
        const float delta = reward[k] + (goes_on[k] ? gamma * next_value : 0.0f) - value[k];
        advantage = delta + (goes_on[k] ? decay * advantage : 0.0f);
        const std::uint64_t i = (left - 1 - k) * envs + env;
        advantages[i] = advantage;
        returns[i] = value[k] + advantage;
        next_value = value[k];
      }
    }
  }
}

}  // namespace pearl::device

using namespace pearl::device;

PEARL_KERNEL pearl_gae(std::uint64_t horizon, std::uint64_t envs, std::uint32_t number_bytes, const void* rewards,
                       float reward_offset, float reward_scale, const void* values, float value_offset,
                       float value_scale, const float* bonus, const float* last_values, const std::uint8_t* ends,
                       float* advantages, float* returns, float gamma, float decay) {
  const auto scan = [&](auto source) {
    using Source = decltype(source);
    scan_backwards(horizon, envs, Source{rewards, reward_offset, reward_scale},
                   Source{values, value_offset, value_scale}, bonus, last_values, ends, advantages, returns, gamma,
                   decay);
  };
  if (number_bytes == 1)
    scan(GaeDecoded<std::uint8_t>{});
  else if (number_bytes == 2)
    scan(GaeDecoded<std::uint16_t>{});
  else
    scan(GaeFloats{});
}
