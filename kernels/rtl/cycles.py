"""Cycles of the learner pipeline: the papers' closed forms (`eq6`, `cf22_pipeline`) and those of its stages.

Needs neither Amaranth nor numba. `pearl.backends.fpga.tree_shape.TreeShape` has the cycles of the replay pipeline.
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
    """Return the cycles of one gradient step of `batch` with its weight update, for buffers that are deep enough.

    `(ceil(B / DP) - 1) * max(II) + longest path of latencies + T_WU`. With N weight layers the longest path leads to
    the first layer's gradients, FP 1..N, LOSS, BP N..2, GA 1: 2 N + 1 of the 3 N stages, as GA of a layer and BP of
    the previous one run in parallel. Each stage counts with its own latency.
    """
    sub_batch = -(-batch // learner.pipelines)
    longest = max(finish for _, finish in learner.first_item().values())
    return (sub_batch - 1) * learner.slowest_interval + longest + learner.update_cycles
