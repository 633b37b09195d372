// Stratified batches without repetition: Deville's systematic sampling on a sum tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/sum_tree.hpp"

namespace pearl {

// Fills `indices` with `count` different leaves (at least as many must be above zero) and `values` with their values for
// importance weights: the leaf, but at most the share of one draw.
//
// A leaf is drawn with probability count * leaf / total. Leaves where that is 1 or more are always drawn, and the
// other draws are distributed over the rest in the same way. `random` holds 2 * count numbers uniform in [0, 2^64).
//
// The rest is cut into strata of equal mass, one for each draw. A leaf that crosses the border of two strata is drawn
// in the second with a probability that depends on whether it was drawn in the first: it never comes twice and keeps its
// probability (Deville 1998; Chauvet, "On a characterization of ordered pivotal sampling", 2012).
//
// Changes the tree temporarily.
void sample_systematically(SumTree& tree, std::size_t count, const std::vector<std::uint64_t>& random,
                           std::int64_t* indices, std::uint32_t* values);

}  // namespace pearl
