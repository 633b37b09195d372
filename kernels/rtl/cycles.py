"""Cycles of the learner pipeline: the papers' closed forms, `eq6` and `cf22`, and what its stages take.

Nothing here needs Amaranth or numba. Those of the replay pipeline are methods of
`pearl.backends.fpga.tree_shape.TreeShape`.
"""

from __future__ import annotations

from kernels.rtl.learner_stages import Learner


def eq6(batch: int, layers: int, stage_cycles: int) -> int:
    """Return PEARL's T_Learner (Eq. 6), `layers` counting the input, as PEARL's Table III does."""
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
