"""The cycles of a sum tree's pipeline on an FPGA, as the kernels of `kernels/include/pearl/fpga_replay.hpp` run it.

The cycles of each kernel come from one of two sources: a compiler's report (`reported_replay`), or nominal ones
(`nominal_kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageTiming:
    """One level of the tree: a request takes `latency_cycles`, and the next one may enter after `interval_cycles`.

    `head_cycles` are spent before the first level and after the last.
    """

    interval_cycles: int
    latency_cycles: int
    head_cycles: int = 0

    @classmethod
    def of(cls, stages: Sequence[tuple[int, float]], bridges: Sequence[int], passes: int = 1) -> StageTiming:
        """The timing of `stages`, each an interval and a latency, from the root on, with `passes` in a row.

        It has the interval of the slowest stage, the mean latency below the root, and the root's latency. `bridges`
        count by their intervals alone: their waits for host memory are T_comm, which Eq. 7 adds.
        """
        (_, root), *levels = stages
        slowest = max(interval for interval, _ in stages) * passes
        level = math.ceil(sum(latency for _, latency in levels) * passes / len(levels))
        return cls(max(slowest, *bridges), level, math.ceil(root * passes))

    def cycles(self, depth: int, requests: int) -> int:
        """Cycles of consecutive `requests` through `depth` levels below the root."""
        if not requests:
            return 0
        return self.interval_cycles * (requests - 1) + self.latency_cycles * depth + self.head_cycles


@dataclass(frozen=True)
class ReplayTiming:
    """Sampling, and updates or insertions.

    An update is two requests in a row: one writes the leaf, the other adds the difference to the sums above it.
    """

    sampling: StageTiming
    update: StageTiming
