// Teams of lanes, which look at a family of a sum tree's nodes together where a lane is a thread: neighbours read neighbours,
// so that a family is one access to memory. Where a lane is a part of a vector, it works alone.
#pragma once

#include "pearl/device/group.hpp"
#include "pearl/quantise.hpp"

#if defined(PEARL_SYCL_KERNELS)

namespace pearl::device {

inline constexpr unsigned kTeam = 1;
// What pick() finds, and the sum of a family.
template <class Node>
std::uint64_t team_pick(const Place&, const Node* family, unsigned fanout, std::uint64_t& target) {
  return pick(family, fanout, target);
}
template <class Node>
std::uint64_t team_sum(const Place&, const Node* family, unsigned fanout) {
  std::uint64_t sum = 0;
  for (unsigned k = 0; k < fanout; ++k) sum += family[k];
  return sum;
}

}  // namespace pearl::device

#elif defined(PEARL_CUDA_KERNELS)

namespace pearl::device {

// All of a team, threads of one warp, call these functions with the same arguments.
inline constexpr unsigned kTeam = kThreadTeam;

struct Team {
  unsigned at;     // this lane's place
  unsigned first;  // the team's first lane in its warp
  unsigned mask;   // its lanes in their warp
};

PEARL_DEVICE Team team_of(const Place& place) {
  const unsigned at = static_cast<unsigned>(place.lane) % kTeam;
  const unsigned first = static_cast<unsigned>(place.lane) % kWarp - at;
  return {at, first, ((1u << kTeam) - 1) << first};
}

// What pick() finds; all of the team get it.
template <class Node>
PEARL_DEVICE std::uint64_t team_pick(const Place& place, const Node* family, unsigned fanout, std::uint64_t& target) {
  const Team team = team_of(place);
  std::uint64_t before = 0;  // the sum of the nodes that are passed
  unsigned passed = 0;
  for (unsigned base = 0; base < fanout; base += kTeam) {
    const unsigned k = base + team.at;
    std::uint64_t sum = k < fanout ? static_cast<std::uint64_t>(family[k]) : 0;  // up to this node
    for (unsigned step = 1; step < kTeam; step *= 2) {
      const std::uint64_t lower = __shfl_sync(team.mask, sum, team.first + (team.at >= step ? team.at - step : team.at));
      if (team.at >= step) sum += lower;
    }
    sum += before;
    const unsigned beyond = __ballot_sync(team.mask, k + 1 < fanout && sum <= target) & team.mask;
    const auto count = static_cast<unsigned>(__popc(beyond));  // sums never fall: the first ones
    passed += count;
    const std::uint64_t highest = __shfl_sync(team.mask, sum, team.first + (count > 0 ? count - 1 : 0));
    if (count > 0) before = highest;
    if (count < kTeam) break;
  }
  target -= before;
  return passed;
}

// The sum of a family; all of the team get it.
template <class Node>
PEARL_DEVICE std::uint64_t team_sum(const Place& place, const Node* family, unsigned fanout) {
  const Team team = team_of(place);
  std::uint64_t sum = 0;
  for (unsigned k = team.at; k < fanout; k += kTeam) sum += static_cast<std::uint64_t>(family[k]);
  for (unsigned step = kTeam / 2; step > 0; step /= 2)
    sum += __shfl_sync(team.mask, sum, team.first + (team.at ^ step));
  return sum;
}

}  // namespace pearl::device

#endif
