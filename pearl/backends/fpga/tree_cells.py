"""A model of the FPGA resources of a sum tree's pipeline, computed from its structure in microseconds, no synthesis.

Memories are counted block by block. LUTs and flip-flops follow the registers, adders and multiplexers of
kernels/rtl/replay_pipeline.py on UltraScale+, bit by bit. The optimisations of synthesis are not modelled; docs/rtl.md
gives the error.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pearl.backends.fpga.tree_shape import TreeShape

# Kb of a block -> its possible rows and bits with a read and a write port. 18: half a block RAM of UltraScale+ (AMD
# UG573), 20: Intel's M20K.
_BLOCK_SHAPES = {
    18: ((512, 36), (1024, 18), (2048, 9), (4096, 4), (8192, 2), (16384, 1)),
    20: ((512, 40), (1024, 20), (2048, 10)),
}
_ULTRA_ROWS, _ULTRA_BITS = 4096, 72
_OPERATION_BITS = 3
_SHORTEST_SHIFT = 3  # a shorter delay stays in flip-flops


@dataclass(frozen=True)
class Cells:
    """Resources of an UltraScale+ device that a design takes.

    `luts` include `memory_luts`, those that are memories or shift registers. Half a 36 Kb block RAM counts 0.5;
    UltraRAMs have 288 Kb. Yosys never packs two small LUTs into one, as placement may: its `luts` are an upper bound.
    """

    luts: int
    memory_luts: int
    flip_flops: int
    dsps: int
    block_rams: float
    ultra_rams: int


def memory_blocks(bits: int, rows: int, *, ultra_ram: bool = False, block_kbit: int = 18) -> tuple[int, float, int]:
    """Return LUTs, pairs of blocks (36 Kb block RAMs) and UltraRAMs of `rows` words of `bits` bits."""
    if rows <= 32:
        return 8 * -(-bits // 14), 0.0, 0
    if rows <= 64:
        return 8 * -(-bits // 7), 0.0, 0
    blocks = min(-(-bits // width) * -(-rows // depth) for depth, width in _BLOCK_SHAPES[block_kbit]) / 2
    if ultra_ram and blocks > 8:
        # Several words may share a row; each then takes whole bytes of nine bits.
        ultra = min(
            -(-(bits if words == 1 else words * 9 * -(-bits // 9)) // _ULTRA_BITS) * -(-rows // (words * _ULTRA_ROWS))
            for words in (1, 2, 4, 8, 16, 32)
        )
        return 0, 0.0, ultra
    return 0, blocks, 0


def estimate(shape: TreeShape, *, ultra_ram: bool = False, block_kbit: int = 18) -> Cells:
    """Return the pipeline's cells; `ultra_ram` lets large memories become UltraRAM, as in `kernels.rtl.synthesis`.

    There are no multiplications, so no DSPs. With `block_kbit=20` a block RAM is two M20K.
    """
    luts = flip_flops = memory_luts = ultra_rams = 0
    block_rams = 0.0

    def store(bits: int, rows: int) -> None:
        """Add a memory, with the bypass from a write to the next read where one is needed (not for LUT memories)."""
        nonlocal luts, flip_flops, memory_luts, block_rams, ultra_rams
        distributed, blocks, ultra = memory_blocks(bits, rows, ultra_ram=ultra_ram, block_kbit=block_kbit)
        memory_luts, block_rams, ultra_rams = memory_luts + distributed, block_rams + blocks, ultra_rams + ultra
        if distributed:
            flip_flops += bits * (shape.cycles_per_access == 2)  # with 1, the address is registered, not the word
        elif shape.cycles_per_access == 1:
            flip_flops, luts = flip_flops + bits, luts + bits

    def delay(bits: int, cycles: int) -> None:
        """Add a delay without taps: a shift register if it is long enough."""
        nonlocal flip_flops, memory_luts
        if cycles >= _SHORTEST_SHIFT:
            memory_luts += bits * -(-cycles // 32)
        else:
            flip_flops += bits * cycles

    index = shape.index_bits
    # Head: the port's counter, the root's register and adder, the request that leaves it.
    flip_flops += shape.bits(0) + _OPERATION_BITS + shape.leaf_bits + 4
    luts += shape.bits(0)
    if shape.assigns:
        store(shape.leaf_bits, shape.slots)
        flip_flops += 2 * (shape.bits(0) + _OPERATION_BITS + 1) + index
        luts += 4 * shape.leaf_bits
    lanes, steps, beats = shape.lanes, shape.lane_bits, shape.beats
    for memory in shape.memories:
        bits, above = memory.bits, shape.bits(memory.level - 1)
        is_leaf = memory.level == shape.depth
        store(lanes * bits, max(memory.rows, 2))
        # Update: the lane's node, the sum, the word written.
        luts += bits * -(-(lanes - 1) // 3) + bits + lanes * bits * (lanes > 1)
        # Prefix sums, one level of adders in each cycle: a lane adds where its number has a one, else it waits.
        for lane in range(lanes):
            adding = f"{lane:0{steps}b}"[::-1] if steps else ""
            for same, run in itertools.groupby(enumerate(adding), key=lambda step: step[1]):
                count = len(list(run))
                if same == "1":
                    flip_flops, luts = flip_flops + count * (bits + 1), luts + count * bits
                else:
                    delay(bits, count)
        # The comparison, its operands, and the rest of the target.
        flip_flops += (lanes if is_leaf else lanes - 1) * bits + lanes + above + 1
        luts += lanes * (bits + steps) + 2 * above
        # The choice among the sums.
        luts += (1 + is_leaf) * bits * -(-lanes // 3) + above + shape.digit_bits
        if beats > 1:
            flip_flops += (
                2 * (shape.sample_cycles - 1).bit_length() + (memory.rows - 1).bit_length() + beats.bit_length()
            )
            luts += (memory.rows - 1).bit_length() + 12
        # The request: its target until the comparison, then its difference, and the output.
        flip_flops += shape.level_latency
        delay(index, shape.level_latency - 1)
        flip_flops += _OPERATION_BITS + above + memory.level * shape.digit_bits
        delay(_OPERATION_BITS + above, steps)
        delay(_OPERATION_BITS + shape.leaf_bits + 1, shape.level_latency - 2 - steps)
        flip_flops += _OPERATION_BITS + shape.digit_bits + bits
    return Cells(luts + memory_luts, memory_luts, flip_flops, 0, block_rams, ultra_rams)
