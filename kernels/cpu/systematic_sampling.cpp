#include "pearl/systematic_sampling.hpp"

#include <algorithm>

#include "pearl/philox.hpp"

namespace pearl {
namespace {

__extension__ using Wide = unsigned __int128;

// The leaves at the borders of strata: the k-th contains position k * total / count.
struct Borders {
  explicit Borders(std::size_t count) : leaves(count), values(count), targets(count) {}

  void find(const SumTree& tree, std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) targets[k] = static_cast<std::uint64_t>(Wide{tree.total()} * k / count);
    tree.find(targets.data(), count, count, leaves.data(), values.data());
  }

  std::vector<std::int64_t> leaves;
  std::vector<std::uint32_t> values;
  std::vector<std::uint64_t> targets;
};

// Removes from the tree the leaves whose share is at least one draw; each spans a border. Returns how many.
std::size_t take_certain(SumTree& tree, Borders& borders, std::size_t count, std::int64_t* indices,
                         std::uint32_t* values) {
  std::size_t taken = 0;
  for (std::size_t k = 0; k < count; ++k) {
    if (Wide{borders.values[k]} * count < tree.total() || (k > 0 && borders.leaves[k] == borders.leaves[k - 1])) continue;
    indices[taken] = borders.leaves[k];
    values[taken++] = borders.values[k];
  }
  const std::vector<std::uint32_t> none(taken, 0);
  tree.assign(indices, none.data(), taken);
  return taken;
}

// Draws one leaf from each of `count` strata; no stratum is smaller than a leaf.
void draw_strata(const SumTree& tree, Borders& borders, std::size_t count, const std::uint64_t* points,
                 const std::uint64_t* turns, std::int64_t* indices, std::uint32_t* values) {
  // Positions in units of 1 / count: the k-th stratum is [k * total, (k + 1) * total).
  const std::uint64_t total = tree.total();
  std::vector<bool> again(count);
  for (std::size_t k = 0; k < count; ++k) {
    const Wide start = Wide{total} * k;
    const Wide mass = Wide{borders.values[k]} * count;
    // The parts of the leaf at the border before and behind the border.
    const auto before =
        static_cast<std::uint64_t>(start - Wide{tree.sum_before(static_cast<std::size_t>(borders.leaves[k]))} * count);
    const std::uint64_t behind = before > 0 ? static_cast<std::uint64_t>(mass) - before : 0;
    borders.targets[k] = static_cast<std::uint64_t>((start + behind + mulhi64(points[k], total - behind)) / count);
    again[k] = mulhi64(turns[k], total - before) < behind;
  }
  tree.find(borders.targets.data(), count, count, indices, values);
  for (std::size_t k = 1; k < count; ++k) {
    if (!again[k] || indices[k - 1] == borders.leaves[k]) continue;
    indices[k] = borders.leaves[k];
    values[k] = borders.values[k];
  }
}

}  // namespace

void sample_systematically(SumTree& tree, std::size_t count, const std::vector<std::uint64_t>& random,
                           std::int64_t* indices, std::uint32_t* values) {
  Borders borders(count);
  std::size_t certain = 0;
  for (std::size_t taken = 1; taken > 0 && certain < count; certain += taken) {
    borders.find(tree, count - certain);
    taken = take_certain(tree, borders, count - certain, indices + certain, values + certain);
  }
  const std::size_t left = count - certain;
  if (left > 0)
    draw_strata(tree, borders, left, random.data(), random.data() + count, indices + certain, values + certain);
  const std::uint64_t most = left > 0 ? tree.total() / left : 1;
  tree.assign(indices, values, certain);
  for (std::size_t i = 0; i < certain; ++i)
    values[i] = static_cast<std::uint32_t>(std::min<std::uint64_t>(values[i], most));
}

}  // namespace pearl
