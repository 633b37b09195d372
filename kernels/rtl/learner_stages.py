"""The stages of the FPGA learner (PEARL Fig. 7, CF'22 Sec. 3.2) for linear layers, and how they are joined."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pearl.errors import ConfigurationError


@dataclass(frozen=True)
class Stage:
    """Takes a new item every `interval` cycles, gives it on after `latency` cycles; `sources` are what it waits for."""

    name: str
    sources: tuple[str, ...]
    operations: int
    unroll: int
    interval: int
    latency: int


@dataclass(frozen=True)
class Learner:
    """`pipelines` copies (DP) of `stages`, listed sources first, and a weight update after all are done."""

    stages: tuple[Stage, ...]
    pipelines: int
    update_cycles: int

    @property
    def multipliers(self) -> int:
        """Multiply-accumulate units of all copies, those of the update left out."""
        return self.pipelines * sum(stage.unroll for stage in self.stages)


def operations_of(widths: Sequence[int]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return operations per item and sources of each stage, for layers of `widths` (input first): FP, LOSS, BP, GA.

    FP, BP and GA of layer l have one multiply-accumulate per weight, LOSS one operation per output; the first layer
    needs no BP. Buffers that reach past stages are sources too: GA takes its layer's input from the FP before it.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise ConfigurationError(
            f"A learner has at least an input and an output, each at least 1 wide; found {widths}."
        )
    last = len(widths) - 1
    weights = {layer: widths[layer - 1] * widths[layer] for layer in range(1, last + 1)}
    stages: dict[str, tuple[int, tuple[str, ...]]] = {}
    for layer in range(1, last + 1):
        stages[f"FP{layer}"] = (weights[layer], (f"FP{layer - 1}",) if layer > 1 else ())
    stages["LOSS"] = (widths[-1], (f"FP{last}",))
    for layer in range(last, 0, -1):
        error = "LOSS" if layer == last else f"BP{layer + 1}"
        stages[f"GA{layer}"] = (weights[layer], (error, f"FP{layer - 1}") if layer > 1 else (error,))
        if layer > 1:
            stages[f"BP{layer}"] = (weights[layer], (error, f"FP{layer - 1}"))
    return stages


def balanced_unrolls(widths: Sequence[int], multipliers: int) -> dict[str, int]:
    """Return the unroll factors that make the slowest stage as fast as `multipliers` units in all allow (Eq. 3).

    Raises ConfigurationError where there is less than one unit a stage.
    """
    operations = {name: count for name, (count, _) in operations_of(widths).items()}
    if multipliers < len(operations):
        raise ConfigurationError(
            f"{len(operations)} stages need a multiplier each; found {multipliers}. Fewer pipelines, or fewer layers."
        )
    low, high = 1, max(operations.values())  # the interval sought: the smallest that the units allow
    while low < high:
        interval = (low + high) // 2
        if sum(-(-count // interval) for count in operations.values()) <= multipliers:
            high = interval
        else:
            low = interval + 1
    return {name: -(-count // low) for name, count in operations.items()}


def proportional_unrolls(widths: Sequence[int], factor: int) -> dict[str, int]:
    """Return the unroll factors of CF'22 Sec. 3.2.3: r_i * f, r_i being the operations of stage i over the fewest.

    The loss, whose operations are no multiplications, gets f and is not the fewest.
    """
    operations = {name: count for name, (count, _) in operations_of(widths).items()}
    fewest = min(count for name, count in operations.items() if name != "LOSS")
    return {name: max(-(-count // fewest), 1) * factor for name, count in operations.items()}


def learner_of(
    widths: Sequence[int],
    unrolls: Mapping[str, int],
    *,
    pipelines: int = 1,
    update_unroll: int = 0,
    arithmetic_latency: int = 0,
) -> Learner:
    """Return the learner of a stack of linear layers of `widths`, input first.

    A stage takes `ceil(operations / unroll)` cycles an item, and `arithmetic_latency` more before it gives the item on.
    `update_unroll` weights a cycle are summed over the pipelines and updated after the batch, a copy at a time (T_WU of
    CF'22 Sec. 3.2.3); 0 leaves that out.
    """
    stages = tuple(
        Stage(
            name, sources, count, unrolls[name], interval := -(-count // unrolls[name]), interval + arithmetic_latency
        )
        for name, (count, sources) in operations_of(widths).items()
    )
    updates = 0
    if update_unroll:
        weights = (first * second for first, second in itertools.pairwise(widths))
        updates = sum(-(-pipelines * count // update_unroll) for count in weights)
    return Learner(stages, pipelines, updates)


def exact_depths(learner: Learner) -> dict[tuple[str, str], int]:
    """Return the items that each buffer (source, stage) must hold so that no stage waits for room.

    What reaches past stages waits for what takes the long way: the activations of the first of N layers for 2 (N - 1)
    stages more. Eq. 2 counts a buffer as one item.
    """
    slowest = max(stage.interval for stage in learner.stages)
    finish: dict[str, int] = {}
    start: dict[str, int] = {}
    for stage in learner.stages:
        start[stage.name] = max((finish[source] for source in stage.sources), default=0)
        finish[stage.name] = start[stage.name] + stage.latency
    return {
        (source, stage.name): max(-(-(start[stage.name] - finish[source]) // slowest), 1)
        for stage in learner.stages
        for source in stage.sources
    }
