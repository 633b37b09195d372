"""A model of the FPGA resources of HEPPO-GAE's elements and array, computed from their structure, no synthesis.

It follows the registers, adders and multiplexers of kernels/rtl/gae_element.py and gae_array.py on UltraScale+, bit by
bit, as tree_cells.py does for the replay pipeline; docs/rtl.md gives the error. All registers are flip-flops: Yosys
moves none into DSPs, where placement can keep those of the multipliers (`multiplier_registers`).
"""

from __future__ import annotations

from pearl.backends.fpga.gae_shape import (
    CODE_BITS,
    DSP_COEFFICIENT_BITS,
    DSP_NUMBER_BITS,
    NUMBER_BITS,
    SCALE_BITS,
    SCALE_FRACTION,
    GaeShape,
)
from pearl.backends.fpga.tree_cells import Cells, memory_blocks


def multiplier_registers(shape: GaeShape) -> int:
    """Return the flip-flops of an element that hold partial products or their sums."""
    flip_flops = 0
    for place, bits in enumerate(shape.factors):
        in_loop = place == shape.lookahead
        if not in_loop or shape.lookahead > 1:
            flip_flops += _partial_bits(shape, bits)
        if not in_loop or shape.lookahead > 2:
            flip_flops += bits + 1
    return flip_flops


def estimate_element(shape: GaeShape) -> Cells:
    """Return the cells of one processing element."""
    k, bits = shape.lookahead, NUMBER_BITS
    # Reward less value, choice of V_{t+1}, the adder of the return, both saturations.
    luts = (bits + 1) + bits + (bits + 1) + 2 * bits
    luts += sum(_product_luts(shape, factor) for factor in shape.factors)
    luts += sum(shape.sum_bits(terms) + 1 for terms in range(1, k + 1)) + shape.sum_bits(k) + 2
    # Values, V_{t+1}, the residual, A_t, both results.
    flip_flops = 5 * bits + shape.sum_bits(1) + 1 + multiplier_registers(shape)
    flip_flops += sum(shape.sum_bits(terms) for terms in range(2, k + 1))
    flip_flops += max(2 * k - 3, 0) * shape.sum_bits(1)  # residuals that wait for a product
    # Shift registers: reward less value, the value until its return, the ends of episodes.
    memory_luts = (bits + 1) + bits + 1
    return Cells(luts + memory_luts, memory_luts, flip_flops, shape.element_dsps, 0.0, 0)


def estimate_array(shape: GaeShape) -> Cells:
    """Return the cells of all rows, their memories and their control."""
    element = estimate_element(shape)
    rewards = memory_blocks(NUMBER_BITS, shape.horizon)
    values = memory_blocks(NUMBER_BITS + 1, shape.horizon)
    memory_luts = element.memory_luts + rewards[0] + values[0]
    # Each word written is pushed or a result.
    luts, flip_flops = element.luts + rewards[0] + values[0] + 2 * NUMBER_BITS, element.flip_flops
    if rewards[0]:
        flip_flops += 2 * NUMBER_BITS + 1  # LUTs do not hold the word that was read
    if shape.codes:
        halves = CODE_BITS + SCALE_BITS - (SCALE_FRACTION - 1)
        luts, flip_flops = luts + 2 * halves, flip_flops + 2 * (halves + NUMBER_BITS) + 2
    steps = shape.horizon.bit_length()  # two counters, two addresses
    return Cells(
        shape.rows * luts + 4 * steps + 6,
        shape.rows * memory_luts,
        shape.rows * flip_flops + 2 * steps + shape.latency.bit_length() + shape.loader_latency + 2,
        shape.dsps,
        shape.rows * (rewards[1] + values[1]),
        0,
    )


def _partial_bits(shape: GaeShape, bits: int) -> int:
    """Return the bits of the partial products; a single sum of two does not need the lowest of the first."""
    pieces = -(-shape.coefficient_bits // DSP_COEFFICIENT_BITS)
    return pieces * bits + 2 * shape.coefficient_bits - (DSP_NUMBER_BITS if pieces == 1 else 0)


def _product_luts(shape: GaeShape, bits: int) -> int:
    """Return the LUTs that add partial products: one adder for two, and two levels of compressors for four."""
    pieces = -(-shape.coefficient_bits // DSP_COEFFICIENT_BITS)
    adder = bits + min(shape.coefficient_bits, DSP_COEFFICIENT_BITS) - DSP_NUMBER_BITS - 1
    return adder + 2 * bits * (pieces - 1)
