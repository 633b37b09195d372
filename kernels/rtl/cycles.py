"""Cycles of the replay pipeline and of the learner pipeline: the papers' closed forms, and what hardware takes.

Nothing here needs Amaranth or numba. Forms called `eq4`, `eq5`, `eq6` and `cf22` are the papers', transfers left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.rtl.learner_stages import Learner
from kernels.rtl.tree_shape import TreeShape
from pearl.errors import ConfigurationError


def eq4(batch: int, depth: int, fanout: int) -> int:
    """Return PEARL's T_sampling (Eq. 4)."""
    return 2 * fanout * (batch + depth)


def eq5(batch: int, depth: int) -> int:
    """Return PEARL's T_update or T_insert (Eq. 5)."""
    return 2 * (batch + depth)


def sampling_cycles(shape: TreeShape, batch: int) -> int:
    """Return the cycles from the first request's acceptance to the last result of a batch of samplings, both counted.

    `c * F / P * (B - 1)` for the requests, `c` being `cycles_per_access` and `P` the lanes, and for filling
    `D * (c * (F / P - 1) + log2 P + 3) + h + 1`, `h` being the cycles of the head. Eq. 4 is `c = 2`, `P = 1`, with
    `2 F D` for filling.
    """
    return _cycles(shape, shape.sample_cycles, batch)


def pass_cycles(shape: TreeShape, batch: int) -> int:
    """Return the same for a batch of retrievals, differences or assignments: `c * (B - 1)`, and the filling above.

    Filling is a sampling's: all requests spend the same time in a level.
    """
    return _cycles(shape, shape.other_cycles, batch)


def update_cycles(shape: TreeShape, batch: int) -> int:
    """Return the cycles of an update or insertion of a batch, the old leaves unknown to whom asks for it.

    One pass with the copy of the leaves (`assigns`). Without, a pass that retrieves and one that adds the differences
    (PEARL Sec. V), each difference sent as soon as its leaf has come back.
    """
    if shape.assigns:
        return pass_cycles(shape, batch)
    # The first difference may follow the first retrieved leaf, but not before the last retrieval was sent.
    return max(batch * shape.other_cycles, shape.latency + 1) + pass_cycles(shape, batch)


def mixed_cycles(shape: TreeShape, samplings: Sequence[bool]) -> int:
    """Return the cycles of a stream in any order, each request a sampling (True) or another (False)."""
    spacing = sum(shape.sample_cycles if sampling else shape.other_cycles for sampling in samplings[:-1])
    return spacing + shape.latency + 1


def _cycles(shape: TreeShape, spacing: int, batch: int) -> int:
    if batch < 1:
        raise ConfigurationError(f"A batch has at least one request; found {batch}.")
    return spacing * (batch - 1) + shape.latency + 1


def eq6(batch: int, layers: int, stage_cycles: int) -> int:
    """Return PEARL's T_Learner (Eq. 6)."""
    return stage_cycles * (batch + 3 * (layers - 1))


def cf22_pipeline(sub_batch: int, layers: int, slowest_stage_cycles: int) -> int:
    """Return CF'22's T_pipeline (Sec. 3.2.3), `layers` counting the input: n = 3 (L - 1) stages in a row."""
    return (sub_batch + 3 * (layers - 1) - 1) * slowest_stage_cycles


def learner_cycles(learner: Learner, batch: int) -> int:
    """Return the cycles of one gradient step of `batch`, weight update included, with buffers deep enough.

    `(ceil(B / DP) - 1) * max(II) + longest path of latencies + T_WU`. With N weight layers the longest path is that of
    the first layer's gradients, FP 1..N, LOSS, BP N..2, GA 1: 2 N + 1 stages of 3 N, as GA of a layer and BP of the
    one before run side by side; each counts with its own latency.
    """
    sub_batch = -(-batch // learner.pipelines)
    stages = learner.stages
    arrival: dict[str, int] = {}
    for stage in stages:
        arrival[stage.name] = max((arrival[source] for source in stage.sources), default=0) + stage.latency
    slowest = max(stage.interval for stage in stages)
    return (sub_batch - 1) * slowest + max(arrival.values()) + learner.update_cycles
