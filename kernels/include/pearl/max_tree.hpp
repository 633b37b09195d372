// A tree of maxima over slots: finds the first slot with the largest key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/aligned.hpp"

namespace pearl {

class MaxTree {
 public:
  explicit MaxTree(std::size_t capacity) {
    std::size_t nodes = capacity;
    levels_.emplace_back(round_up(nodes, kFanout));
    while (nodes > 1) {
      nodes = (nodes + kFanout - 1) / kFanout;
      levels_.emplace_back(round_up(nodes, kFanout));
    }
  }

  void set(std::size_t slot, std::uint32_t key) {
    levels_[0][slot] = key;
    for (std::size_t level = 1; level < levels_.size(); ++level) {
      slot /= kFanout;
      const std::uint32_t* children = levels_[level - 1].data() + slot * kFanout;
      const std::uint32_t largest = *std::max_element(children, children + kFanout);
      if (levels_[level][slot] == largest) return;
      levels_[level][slot] = largest;
    }
  }

  // The first slot of the largest key.
  std::size_t top() const {
    std::size_t node = 0;
    for (std::size_t level = levels_.size() - 1; level-- > 0;) {
      const std::uint32_t largest = levels_[level + 1][node];
      node *= kFanout;
      while (levels_[level][node] != largest) ++node;
    }
    return node;
  }

 private:
  static constexpr std::size_t kFanout = 16;  // a family is one cache line

  std::vector<AlignedArray<std::uint32_t>> levels_;  // levels_[0] are the keys; the last has one node
};

}  // namespace pearl
