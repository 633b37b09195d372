// Random choices of ensembles of critics that depend only on their index, not on earlier draws, so that every engine
// makes the same ones: which critics judge a step's targets, and which numbers a dropout layer drops.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pearl {

// `chosen` different critics out of `critics` for step `step`, in the order in which they are drawn. Words come from
// Philox counter (block, 2, step): draws 0 and 1 of `fill_normal`, with the same seed, are a step's noise.
void choose_critics(std::uint64_t seed, std::uint64_t step, std::size_t critics, std::size_t chosen,
                    std::uint32_t* out);

// A pass of a step's batch through a network with dropout. Nothing is dropped if `active` is false.
struct DropoutPass {
  bool active = false;
  std::uint64_t seed = 0, step = 0;  // of which the low 40 bits count
  std::uint32_t draw = 0;            // pass << 16 | critic << 8; a network adds its layer, from 0 on
  std::size_t first_row = 0;         // of the batch
};

// A layer's factors, 0 with probability `rate` and else 1 / (1 - rate), of `rows` rows from the pass's first row on:
// that of row first_row + r and feature f goes to out[f * feature_stride + r * row_stride]. They are words of Philox
// counters (16 rows: 4, feature, step, draw), with a key of their own.
void fill_dropout(const DropoutPass& pass, std::uint32_t layer, double rate, std::size_t rows, std::size_t width,
                  float* out, std::size_t row_stride, std::size_t feature_stride);

}  // namespace pearl
