// Batches without repetition, drawn stratum by stratum: Deville's systematic sampling on a sum tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pearl/sum_tree.hpp"

namespace pearl {

// Fills `indices` with `count` different leaves (of at least as many above zero) and `values` with what they count for
// importance weights: their value, but no more than the share of one draw.
//
// A leaf is drawn with the probability count * leaf / total. Where that is 1 or more it is drawn for certain, and the
// other draws are shared out over the rest in the same way. `random` are 2 * count numbers uniform in [0, 2^64).
//
// The rest is cut into strata of equal mass, one for each draw. A leaf that crosses the border of two strata is drawn
// in the second with a probability that depends on whether it was drawn in the first, so that it never comes twice and
// keeps its probability (Deville 1998; Chauvet, "On a characterization of ordered pivotal sampling", 2012).
//
// The tree is changed meanwhile, and afterwards as it was.
void sample_systematically(SumTree& tree, std::size_t count, const std::vector<std::uint64_t>& random,
                           std::int64_t* indices, std::uint32_t* values);

}  // namespace pearl
