// Teams of lanes, which look at a family of a sum tree's nodes together where a lane is a thread: neighbours read neighbours,
// so that a family is one access to memory. Where a lane is a part of a vector, it works alone.
#pragma once

#include "pearl/device/group.hpp"
#include "pearl/quantise.hpp"

#if defined(PEARL_SYCL_KERNELS)

namespace pearl::device {

inline constexpr unsigned kTeam = 1;
// The result of pick().
template <class Node>
std::uint64_t team_pick(const Place&, const Node* family, unsigned fanout, std::uint64_t& target) {
  return pick(family, fanout, target);
}
// Calls store(i, sum) with the sum of family(i), for each i below `count`.
template <class Family, class Store>
void sum_families(const Place& place, std::uint64_t count, unsigned fanout, Family family, Store store) {
  for (std::uint64_t i = place.lane; i < count; i += place.lanes) {
    const auto* const nodes = family(i);
    std::uint64_t sum = 0;
    for (unsigned k = 0; k < fanout; ++k) sum += nodes[k];
    store(i, sum);
  }
}

}  // namespace pearl::device

#elif defined(PEARL_CUDA_KERNELS)

namespace pearl::device {

// All threads of a warp call these functions together, whole warps of them: masks that are not constant cost more than
// the arithmetic.
inline constexpr unsigned kTeam = kThreadTeam;
inline constexpr unsigned kWholeWarp = ~0u;

// The result of pick(); all threads of the team give the same arguments and get the same result.
template <class Node>
PEARL_DEVICE std::uint64_t team_pick(const Place& place, const Node* family, unsigned fanout, std::uint64_t& target) {
  const unsigned at = static_cast<unsigned>(place.lane) % kTeam;
  const unsigned first = static_cast<unsigned>(place.lane) % kWarp - at;  // of the team, in its warp
  std::uint64_t before = 0, all = 0;  // the sums of the nodes that are passed, and of those seen
  unsigned passed = 0;
  for (unsigned base = 0; base < fanout; base += kTeam) {
    const unsigned k = base + at;
    std::uint64_t sum = k < fanout ? static_cast<std::uint64_t>(family[k]) : 0;  // up to this node
    for (unsigned step = 1; step < kTeam; step *= 2) {
      const std::uint64_t lower = __shfl_up_sync(kWholeWarp, sum, step, kTeam);
      if (at >= step) sum += lower;
    }
    sum += all;
    const unsigned beyond =
        __ballot_sync(kWholeWarp, k + 1 < fanout && sum <= target) >> first & ((1u << kTeam) - 1);
    const auto count = static_cast<unsigned>(__popc(beyond));  // sums never fall: the first ones
    const std::uint64_t highest = __shfl_sync(kWholeWarp, sum, count > 0 ? count - 1 : 0, kTeam);
    if (count > 0) before = highest;
    passed += count;
    all = __shfl_sync(kWholeWarp, sum, kTeam - 1, kTeam);
  }
  target -= before;
  return passed;
}

// Calls store(i, sum) with the sum of family(i), for each i below `count`; a team adds up several at once, so that the
// accesses to memory overlap.
template <class Family, class Store>
PEARL_DEVICE void sum_families(const Place& place, std::uint64_t count, unsigned fanout, Family family, Store store) {
  constexpr unsigned kAtOnce = 8;
  const unsigned at = static_cast<unsigned>(place.lane) % kTeam;
  const std::uint64_t team = place.lane / kTeam, teams = place.lanes / kTeam;
  for (std::uint64_t base = 0; base < count; base += kAtOnce * teams) {
    std::uint64_t sums[kAtOnce];
#pragma unroll
    for (unsigned u = 0; u < kAtOnce; ++u) {
      const std::uint64_t i = base + u * teams + team;
      const auto* const nodes = family(i < count ? i : count - 1);
      sums[u] = 0;
      for (unsigned k = at; k < fanout; k += kTeam) sums[u] += nodes[k];
    }
#pragma unroll
    for (unsigned u = 0; u < kAtOnce; ++u) {
      for (unsigned step = kTeam / 2; step > 0; step /= 2)
        sums[u] += __shfl_xor_sync(kWholeWarp, sums[u], step, kTeam);
      const std::uint64_t i = base + u * teams + team;
      if (at == 0 && i < count) store(i, sums[u]);
    }
  }
}

}  // namespace pearl::device

#endif
