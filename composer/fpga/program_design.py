"""The design that a program instantiates on an FPGA: its resources, and the search for DP and UF (CF'22 Sec. 3.2.3).

Cycles are those of `composer.fpga.step_timing`, with nominal cycles of each kernel. Resources are counted from what the
kernels allocate: multipliers, the memories of stages and slots, and pipes that hold a sub-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from composer.fpga.learner_program import (
    BLOCK,
    MOST_ROWS,
    LearnerProgram,
    ProgramLayer,
    Unroll,
    most_unroll,
    padded,
)
from composer.fpga.model import (
    LUTS_PER_DSP,
    REGISTERS_PER_DSP,
    Constraint,
    FpgaPart,
    ReplayTree,
    Resources,
    batch_splits,
    kb,
    more,
)
from composer.fpga.nominal_kernels import (
    MOVED,
    SIBLINGS,
    Memory,
    nominal_replay,
    nominal_step,
    nominal_weighing,
    submit_interval,
)
from composer.fpga.replay_timing import ReplayTiming
from composer.fpga.step_timing import JoinedStep, StepTiming
from pearl.backends.fpga.replay import check_tree
from pearl.backends.fpga.tree_cells import memory_blocks
from pearl.errors import CapacityError

# Bits of a slot besides its leaf, each in a memory of its own: priority, generation, count of samples.
SLOT_BITS = (32, 32, 16)
REQUEST_BITS, ANSWER_BITS, CHANGE_BITS = 192, 256, 128  # Request, Answer and Change of pearl/fpga_replay.hpp
PIPE_ITEMS = 64  # of pipes of requests, weights and gradients: PEARL_PIPE_ITEMS

_WORD_BITS = 32
_DETAIL_BITS, _RESULT_BITS = 160, 128
# Multiply-adds of a weight update: 16 for the squares of a block, and about 10 for Adam's move of a weight.
_WU_MACS = BLOCK + 10 * MOVED
_LOSS_MACS = 4  # Huber or squared loss of an item


@dataclass
class _Memories:
    """Adds up memories: LUTs for small ones, whole blocks for others."""

    part: FpgaPart
    luts: float = 0.0
    pairs: float = 0.0

    def add(self, bits: int, rows: int, count: int = 1) -> None:
        luts, pairs, _ = memory_blocks(bits, max(rows, 1), block_kbit=self.part.parameters.block_kbit)
        self.luts, self.pairs = self.luts + count * luts, self.pairs + count * pairs

    def array(self, words: int, lanes: int, count: int = 1) -> None:
        """An array of float32 of which `lanes` are accessed at once: a bank for each."""
        lanes = min(lanes, words)
        self.add(_WORD_BITS * lanes, -(-words // lanes), count)

    def resources(self, macs: float) -> Resources:
        dsps = macs * self.part.parameters.dsp_per_mac
        kbytes = 2 * self.pairs * self.part.block_kb
        return Resources(dsps, kbytes, dsps * LUTS_PER_DSP + self.luts, dsps * REGISTERS_PER_DSP)


# --- the Replay Manager ----------------------------------------------------------------------------------------------


def replay_resources(tree: ReplayTree, part: FpgaPart) -> Resources:
    """The kernels' Replay Manager: sums and leaves, 80 more bits for each slot, and the pipes between stages.

    Integers need no DSP blocks. The logic of its stages is not counted: a few thousand LUTs.
    """
    memories = _Memories(part)
    together = min(tree.fanout, SIBLINGS)
    for level in tree.levels:
        memories.add(together * level.bits, level.nodes // together)
    for bits in SLOT_BITS:
        memories.add(bits, tree.levels[-1].nodes)
    memories.add(REQUEST_BITS, PIPE_ITEMS, tree.depth + 1)
    memories.add(ANSWER_BITS, PIPE_ITEMS)
    memories.add(CHANGE_BITS, PIPE_ITEMS)
    return memories.resources(0)


def replay_bits(tree: ReplayTree) -> int:
    """Bits of the nodes below the root and of all slots, as the kernels allocate them: families are whole."""
    return sum(level.nodes * level.bits for level in tree.levels) + tree.levels[-1].nodes * sum(SLOT_BITS)


def program_tree(capacity: int, fanout: int, part: FpgaPart) -> ReplayTree:
    """The tree of a program; CapacityError if the kernels cannot have it, or `part` cannot hold it."""
    check_tree(capacity, fanout)
    tree = ReplayTree(capacity, fanout)
    needed = replay_resources(tree, part)
    if not (over := needed.exceeding(part.available)):
        return tree
    fits, too_many = 0, capacity
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        small = replay_resources(dataclasses.replace(tree, capacity=middle), part)
        fits, too_many = (fits, middle) if small.exceeding(part.available) else (middle, too_many)
    advice = f"At most {fits:,} fit" if fits else "Not even one fits"
    raise CapacityError(
        f"A sum tree of {capacity:,} priorities with fanout {fanout} needs {kb(needed)} of on-chip memory, of which "
        f"{replay_bits(tree) // tree.levels[-1].nodes} bits for each slot; {part.name} has {kb(part.available)}: "
        f"{more(needed, part.available, over[0])}. {advice}."
    )


# --- the Learner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramDesign:
    """A Learner of `copies` pipelines (DP) with `unroll` (UF), its resources, its cycles, and what limits its speed.

    `joined` are the cycles of an iteration with a Replay Manager on the same FPGA, if there is one.
    """

    timing: StepTiming
    unroll: Unroll
    resources: Resources
    cycles: int
    binding: Constraint
    joined: JoinedStep | None = None

    @property
    def copies(self) -> int:
        """DP."""
        return self.timing.copies

    @property
    def batch_size(self) -> int:
        """Items of a batch."""
        return self.timing.batch_size

    def __str__(self) -> str:
        factors = ", ".join("-".join(map(str, network)) for network in self.unroll)
        used = f"{self.resources.dsps:,.0f} DSP blocks, {kb(self.resources)}"
        items = -(-self.batch_size // self.copies)
        stream, move = (
            max(getattr(found, name) for found in self.timing.weights.values()) for name in ("stream", "move")
        )
        return (
            f"DP {self.copies}, PI {items}, UF {factors}, {used}, bound by {self.binding}; {self.cycles:,} cycles, of "
            f"which WU streams weights for {stream:,.0f} and moves them for {move:,.0f}"
        )


def _macs(program: LearnerProgram, copies: int, unroll: Unroll) -> float:
    one = 0
    for stage in program.stages.values():
        if stage.kind == "LOSS":
            one += _LOSS_MACS
            continue
        network, layer = stage.place
        factor = unroll[network][layer]
        one += factor + (min(factor, BLOCK) if stage.activated else 0)
    return copies * one + _WU_MACS * len(program.weight_stages)


def learner_resources(
    program: LearnerProgram, batch_size: int, copies: int, unroll: Unroll, part: FpgaPart
) -> Resources:
    """Resources of the kernels' Learner. The logic is in proportion to the DSP blocks, as in CF'22 Table 2."""
    memories = _Memories(part)
    items = -(-batch_size // copies)
    for stage in program.stages.values():
        if stage.kind == "LOSS":
            continue
        which, number = stage.place
        layer = program.networks[which][number]
        lanes = max(BLOCK, unroll[which][number])
        memories.array(layer.words, lanes, copies)
        # What an item brings and takes away, twice: the next item comes meanwhile.
        memories.array(2 * (layer.row + padded(layer.outputs)), BLOCK, copies)
        memories.array(PIPE_ITEMS * BLOCK, BLOCK, copies)  # the pipe from or to its WU
    for width in program.wires:
        memories.array(padded(width) * items, BLOCK, copies)
    memories.add(_DETAIL_BITS + _RESULT_BITS + _WORD_BITS, items, copies)
    for network in program.networks:
        for layer in network:
            memories.array(layer.words, BLOCK)
    return memories.resources(_macs(program, copies, unroll))


@functools.lru_cache(maxsize=256)
def _candidates(program: LearnerProgram) -> tuple[Unroll, ...]:
    """The choices of UF, the fastest first: each layer has the least UF with which it keeps up with the slowest one."""

    def interval(layer: ProgramLayer, factor: int) -> int:
        return -(-layer.outputs // max(factor // BLOCK, 1)) * (layer.row // min(factor, BLOCK))

    choices = {
        layer: [(1 << k, interval(layer, 1 << k)) for k in range(most_unroll(layer).bit_length())]
        for network in program.networks
        for layer in network
    }
    least = max(found[-1][1] for found in choices.values())
    intervals = sorted({taken for found in choices.values() for _, taken in found if taken >= least})
    slowest = (
        tuple(
            tuple(next(factor for factor, taken in choices[layer] if taken <= most) for layer in network)
            for network in program.networks
        )
        for most in intervals
    )
    return tuple(dict.fromkeys(slowest))


def _neighbours(program: LearnerProgram, unroll: Unroll) -> Iterator[Unroll]:
    """UF of one layer doubled, for each layer that this may help."""
    for network, layers in enumerate(program.networks):
        for number, layer in enumerate(layers):
            factor = 2 * unroll[network][number]
            if factor <= most_unroll(layer):
                changed = (*unroll[network][:number], factor, *unroll[network][number + 1 :])
                yield (*unroll[:network], changed, *unroll[network + 1 :])


def _order(design: ProgramDesign) -> tuple[float, float, int]:
    return design.cycles, design.resources.dsps, design.copies


_Cycles: TypeAlias = "Callable[[StepTiming], tuple[int, JoinedStep | None]]"


@dataclass(frozen=True)
class ProgramSpace:
    """All designs of `program` for a batch on `part`, whose device memory moves `bytes_per_cycle`."""

    program: LearnerProgram
    part: FpgaPart
    batch_size: int
    bytes_per_cycle: float

    def alone(self) -> ProgramDesign:
        """The fastest Learner of setting 1. Raises CapacityError where none fits, with what is missing."""

        def alone(timing: StepTiming) -> tuple[int, None]:
            return timing.alone(submit_interval(self.program), 1), None

        return self._best(self.part, alone)

    def with_replay(self, tree: ReplayTree, replay: ReplayTiming | None = None) -> ProgramDesign:
        """The fastest Learner joined to the Replay Manager of `tree`, with its nominal cycles or those of `replay`."""
        used = replay_resources(tree, self.part)
        left = self.part.without(used)
        if left is None:
            raise CapacityError(
                f"The Replay Manager's {kb(used)} leave nothing of {self.part.name}'s {kb(self.part.available)} for "
                "the Learner."
            )
        rest = dataclasses.replace(left, name=f"what the Replay Manager leaves of {self.part.name}")

        def joined(timing: StepTiming) -> tuple[int, JoinedStep]:
            found = self.joined(timing, tree, replay)
            return found.cycles, found

        return self._best(rest, joined)

    def joined(self, timing: StepTiming, tree: ReplayTree, replay: ReplayTiming | None = None) -> JoinedStep:
        """The cycles of an iteration of setting 2."""
        paced = replay or nominal_replay(tree.fanout, tree.depth, submit_interval(self.program))
        return timing.joined(paced, tree.depth, nominal_weighing(self.batch_size), 1)

    def _best(self, part: FpgaPart, cycles: _Cycles) -> ProgramDesign:
        """The best design of each DP, with more UF in single layers where that helps and fits; the best of these."""
        found = []
        most = self.program.most_copies if self.batch_size <= MOST_ROWS else 0
        for copies in batch_splits(self.batch_size):
            if copies > most:
                break
            reason: Constraint = "the work"
            designs = []
            for unroll in _candidates(self.program):
                design = self._design(part, cycles, copies, unroll, reason)
                if isinstance(design, ProgramDesign):
                    designs.append(design)
                else:
                    reason = design
            if designs:
                found.append(self._climbed(part, cycles, min(designs, key=_order)))
        if not found:
            self._raise_too_large(part)
        return min(found, key=_order)

    def _climbed(self, part: FpgaPart, cycles: _Cycles, best: ProgramDesign) -> ProgramDesign:
        """`best`, with UF of one layer after the other doubled as long as the fill gets shorter."""
        while True:
            tried = (
                self._design(part, cycles, best.copies, unroll, best.binding)
                for unroll in _neighbours(self.program, best.unroll)
            )
            nearest = min((design for design in tried if isinstance(design, ProgramDesign)), key=_order, default=best)
            if nearest.cycles >= best.cycles:
                return best
            best = nearest

    def _design(
        self, part: FpgaPart, cycles: _Cycles, copies: int, unroll: Unroll, binding: Constraint
    ) -> ProgramDesign | Constraint:
        """The design, or the scarcest resource if it does not fit."""
        used = learner_resources(self.program, self.batch_size, copies, unroll, part)
        if over := used.exceeding(part.available):
            return over[0]
        memory, arithmetic = Memory(self.bytes_per_cycle), part.parameters.arithmetic_cycles
        timing = nominal_step(self.program, self.batch_size, copies, unroll, memory, arithmetic)
        taken, joined = cycles(timing)
        return ProgramDesign(timing, unroll, used, taken, binding, joined)

    def _raise_too_large(self, part: FpgaPart) -> NoReturn:
        program = self.program
        if self.batch_size > MOST_ROWS:
            raise CapacityError(
                f"A batch on an FPGA has 1 to {MOST_ROWS:,} transitions; found {self.batch_size:,}. Lower the batch "
                "size."
            )
        if not program.most_copies:
            raise CapacityError(
                f"A pipeline of these networks has {len(program.stages) + len(program.weight_stages)} stages; at "
                "most 100 run at once. Use networks of fewer layers."
            )
        least = tuple((1,) * len(network) for network in program.networks)
        used = learner_resources(program, self.batch_size, 1, least, part)
        needs = f"{used.dsps:,.0f} DSP blocks and {kb(used)}"
        has = f"{part.available.dsps:,.0f} and {kb(part.available)}"
        stages = len(program.stages) + len(program.weight_stages)
        raise CapacityError(
            f"The Learner's pipeline of {stages} stages needs at least {needs} of on-chip memory; {part.name} has "
            f"{has}: too few {', '.join(used.exceeding(part.available))}. A smaller network or batch would fit, or a "
            "larger part."
        )
