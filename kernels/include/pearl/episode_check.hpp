// Whether links that come from a file can be used: what EpisodeLinks keeps up, seen from outside.
#pragma once

#include <cstddef>
#include <string>

#include "pearl/episode_links.hpp"

namespace pearl {

// What is wrong with the links of a ring of which the slots below `size` hold items and `cursor` is written next; empty
// where nothing is. Every array is read once: links that pass lead nowhere outside, and no use of them can.
std::string damage_of(const EpisodeLinks& links, std::size_t size, std::size_t cursor);

}  // namespace pearl
