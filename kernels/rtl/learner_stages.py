"""The stages of the FPGA learner (PEARL Fig. 7, CF'22 Sec. 3.2) for linear layers, and how they are joined."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pearl.errors import ConfigurationError


@dataclass(frozen=True)
class Stage:
    """Accepts an item every `interval` cycles and passes it on after `latency` cycles; it waits for its `sources`."""

    name: str
    sources: tuple[str, ...]
    operations: int
    unroll: int
    interval: int
    latency: int


@dataclass(frozen=True)
class Learner:
    """`pipelines` copies (DP) of `stages`, in which sources come first, and a weight update after all copies."""

    stages: tuple[Stage, ...]
    pipelines: int
    update_cycles: int

    @property
    def multipliers(self) -> int:
        """Multiply-accumulate units of all copies, without the update."""
        return self.pipelines * sum(stage.unroll for stage in self.stages)

    @property
    def slowest_interval(self) -> int:
        """Cycles between two items, where every buffer is deep enough."""
        return max(stage.interval for stage in self.stages)

    def first_item(self) -> dict[str, tuple[int, int]]:
        """Return the cycles in which each stage accepts the first item and passes it on."""
        times: dict[str, tuple[int, int]] = {}
        for stage in self.stages:
            start = max((times[source][1] for source in stage.sources), default=0)
            times[stage.name] = start, start + stage.latency
        return times


def operations_of(widths: Sequence[int]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return operations per item and sources of each stage, for layers of `widths` (input first): FP, LOSS, BP, GA.

    FP, BP and GA of a layer do one multiply-accumulate per weight, LOSS one operation per output; the first layer has
    no BP. Buffers that skip stages are sources too: GA takes its layer's input from the previous FP.
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

    Raises ConfigurationError for less than one unit per stage.
    """
    operations = {name: count for name, (count, _) in operations_of(widths).items()}
    if multipliers < len(operations):
        raise ConfigurationError(
            f"{len(operations)} stages need a multiplier each; found {multipliers}. Use fewer pipelines or layers."
        )
    low, high = 1, max(operations.values())  # bisects for the smallest interval that the units allow
    while low < high:
        interval = (low + high) // 2
        if sum(-(-count // interval) for count in operations.values()) <= multipliers:
            high = interval
        else:
            low = interval + 1
    return {name: -(-count // low) for name, count in operations.items()}


def proportional_unrolls(widths: Sequence[int], factor: int) -> dict[str, int]:
    """Return the unroll factors of CF'22 Sec. 3.2.3: r_i * f, where r_i is the operations of stage i over the fewest.

    LOSS, which does no multiplications, gets f and does not count for the fewest.
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

    A stage takes `ceil(operations / unroll)` cycles per item, and passes it on `arithmetic_latency` cycles later. After
    the batch, `update_unroll` weights per cycle are summed over the pipelines and updated, one copy at a time (T_WU of
    CF'22 Sec. 3.2.3); 0 means no update.
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

    Items in a buffer that skips stages wait for the longer path: activations of the first of N layers wait 2 (N - 1)
    stages longer. Eq. 2 counts a buffer as one item.
    """
    times = learner.first_item()
    return {
        (source, stage.name): max(-(-(times[stage.name][0] - times[source][1]) // learner.slowest_interval), 1)
        for stage in learner.stages
        for source in stage.sources
    }
