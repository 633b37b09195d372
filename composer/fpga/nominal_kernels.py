"""Nominal cycles of the kernels on an FPGA, for designs without a compiler's report.

They follow from the loops of `kernels/include/pearl/fpga_learner.hpp` and `fpga_replay.hpp`: every loop begins an
iteration per cycle, and a loop waits for the loops inside it. A report has the same loops, with the compiler's cycles;
`reported_stages.one_pass` adds up both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from composer.fpga.learner_program import BLOCK, LearnerProgram, ProgramLayer, Stage, Unroll, blocks
from composer.fpga.replay_timing import ReplayTiming, StageTiming
from composer.fpga.reported_stages import one_pass
from composer.fpga.step_timing import StagePass, StepTiming, WeighingPass, WeightPass
from composer.fpga.vendor_report import BlockReport

MOVED = 4  # weights that a WU moves at once: kMoved of pearl/fpga_learner.hpp
SIBLINGS = 16  # that a search reads at once: kSiblings of pearl/fpga_replay.hpp

_WORD_BYTES = 4  # float32


def loop(trips: int, *inside: BlockReport, latency: float | None = None) -> BlockReport:
    """A loop that begins an iteration per cycle, or when the loops inside it have begun their last one."""
    own = (0.0 if inside else 1.0) if latency is None else latency
    return BlockReport("", loop=True, ii=1, latency_cycles=own, trips=trips, fmax_mhz=0.0, blocks=inside)


def cycles(*found: BlockReport) -> float:
    """Cycles of loops in a row."""
    return _pass(loop(1, *found, latency=0.0))[1]


def _pass(found: BlockReport) -> tuple[int, float]:
    return one_pass(found, lambda block: block.trips)


# --- the Learner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """The device memory that holds weights and optimizer: `bytes_per_cycle` in all."""

    bytes_per_cycle: float


def nominal_step(
    program: LearnerProgram, batch_size: int, copies: int, unroll: Unroll, memory: Memory, arithmetic_cycles: int = 0
) -> StepTiming:
    """The kernels of a Learner; a stage's result comes `arithmetic_cycles` after the last operands of an item."""

    def stage(found: Stage) -> StagePass:
        if found.kind == "LOSS":
            return _plain(found.trips, arithmetic_cycles)
        network, layer = found.place
        of_layer = program.networks[network][layer]
        return _layer_pass(found, of_layer, unroll[network][layer], arithmetic_cycles)

    stages = {name: stage(found) for name, found in program.stages.items()}
    return StepTiming(program, batch_size, copies, stages, _weight_passes(program, memory))


def submit_interval(program: LearnerProgram) -> int:
    """Cycles from row to row in `submit`, or in `collect` if that sends to the Learner."""
    return max(program.row_trips)


@functools.lru_cache(maxsize=4096)
def _plain(trips: tuple[int, ...], latency: int) -> StagePass:
    interval, taken = _pass(loop(0, *map(loop, trips), latency=float(latency)))
    return StagePass(0.0, interval, taken, 0.0)


@functools.lru_cache(maxsize=4096)
def _layer_pass(stage: Stage, layer: ProgramLayer, unroll: int, arithmetic: int) -> StagePass:
    """FP, BP or GA of a layer. `unroll` multiply-accumulates are lanes of a dot product, then rows at once."""
    lanes, rows = min(unroll, BLOCK), max(unroll // BLOCK, 1)
    outputs, row = blocks(layer.outputs), layer.row // BLOCK
    work = loop(-(-layer.outputs // rows), loop(layer.row // lanes))
    weights = cycles(loop(layer.outputs * row), loop(outputs))
    before, after = weights, 0.0
    if stage.kind == "FP":
        items = [loop(row), work, *(loop(outputs),) * stage.wires]
    elif stage.kind == "BP":
        slopes = [loop(row), loop(layer.row // lanes)] if stage.activated else []
        items = [loop(outputs), work, *slopes, *(loop(row),) * stage.wires]
    else:
        after = weights  # as many blocks as it has cleared
        items = [loop(outputs), loop(row), work]
    interval, latency = _pass(loop(0, *items, latency=float(arithmetic)))
    return StagePass(before, interval, latency, after)


@functools.lru_cache(maxsize=256)
def _weight_passes(program: LearnerProgram, memory: Memory) -> Mapping[str, WeightPass]:
    """WU of all layers; they share the memory's bandwidth."""
    streamed, moved = {}, {}
    for name, (network, number) in program.weight_stages.items():
        vectors = 1 + program.has_target(network)
        streamed[name] = program.networks[network][number].weights * vectors
        # Each weight, each value of the optimizer and the target's weight are read and written.
        moved[name] = program.networks[network][number].weights * 2 * (vectors + program.state_words)
    found = {}
    for name, (network, number) in program.weight_stages.items():
        layer, vectors = program.networks[network][number], 1 + program.has_target(network)
        stream = cycles(*(loop(layer.outputs, loop(layer.row // BLOCK)), loop(blocks(layer.outputs))) * vectors)
        move = cycles(loop(layer.outputs, loop(-(-layer.inputs // MOVED))), loop(-(-layer.outputs // MOVED)))
        found[name] = WeightPass(
            max(stream, _shared(streamed, name, memory)),
            cycles(loop(layer.words // BLOCK)),
            1.0,
            max(move, _shared(moved, name, memory)),
        )
    return found


def _shared(words: Mapping[str, int], name: str, memory: Memory) -> float:
    """Cycles until the memory has served `name`, if all get equal shares of its bandwidth until they are served."""
    total = sum(min(count, words[name]) for count in words.values())
    return math.ceil(total * _WORD_BYTES / memory.bytes_per_cycle)


# --- the Replay Manager ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def nominal_replay(fanout: int, depth: int, row_interval: int = 1) -> ReplayTiming:
    """The tree's pipeline. `row_interval` are the cycles that `collect` takes for a sample, to send it to a Learner.

    A search reads up to `SIBLINGS` siblings at a time; nothing else has an inner loop.
    """
    once = _pass(loop(0))
    search = _pass(loop(0, loop(max(1, fanout // SIBLINGS)), latency=1.0))
    sampling = StageTiming.of([once, *(search,) * depth], [row_interval])
    return ReplayTiming(sampling, StageTiming.of([once] * (depth + 1), [1], passes=2))


def nominal_weighing(batch_size: int) -> WeighingPass:
    """`collect` computes all importance weights, then sends them."""
    return WeighingPass(cycles(loop(batch_size), loop(1)), 1)
