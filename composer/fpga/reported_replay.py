"""What a vendor's report says of the Replay Manager on an FPGA: cycles of its stages, at the report's clock.

The report says for each kernel of the recipe in `kernels/sycl/board` how often it takes a request and how long one is
under way; the cycles of a batch are then those of `composer.fpga.model`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer.fpga.model import ReplayTree
from composer.fpga.reported_stages import clock_of, cycle_in, imported, known_trips, loops_of, one_pass
from composer.fpga.vendor_report import KernelReport, VendorReport
from composer.matrix import Measurement, ReplayCell
from pearl.errors import VendorReportError

_KERNEL = re.compile(r"pearl_replay_(?:level(?P<level>[0-9]{1,2})|(?P<bridge>feed|collect))(?![0-9a-z])")
_BESIDE = re.compile(r"pearl_learner_[0-9a-z_]+")
_OURS = "pearl_replay_feed, pearl_replay_level0, level1, ... and pearl_replay_collect"
_NAMES = (
    "cycle",
    *(f"{operation}_{part}" for operation in ("sample", "update") for part in ("interval", "level", "head")),
)


@dataclass(frozen=True)
class StageTiming:
    """One level of the tree: a request leaves it after `latency_cycles`, the next may enter after `interval_cycles`.

    `head_cycles` pass before the first level and after the last.
    """

    interval_cycles: int
    latency_cycles: int
    head_cycles: int = 0

    def cycles(self, depth: int, requests: int) -> int:
        """Cycles of `requests` that follow one another through `depth` levels below the root."""
        if not requests:
            return 0
        return self.interval_cycles * (requests - 1) + self.latency_cycles * depth + self.head_cycles


@dataclass(frozen=True)
class ReportedReplay:
    """What a report says of the pipeline of `tree`: its clock, and the cycles of its stages.

    An update is two requests, one after the other: the new leaf, and then what it adds to the sums above.
    """

    tree: ReplayTree
    frequency_mhz: float
    sampling: StageTiming
    update: StageTiming

    @classmethod
    def of(cls, report: VendorReport, tree: ReplayTree) -> ReportedReplay:
        """What `report` says of the Replay Manager of `tree`.

        Raises VendorReportError for a report on another design or tree, and for one without initiation intervals;
        CapacityError where the design does not fit the part that it was compiled for.
        """
        stages, feed, collect, joined = _kernels_of(report, tree)
        frequency_mhz = clock_of(report, "fewer slots (PEARL_CAPACITY)")

        def interval(kernel: KernelReport, loop: int) -> int:
            trips = known_trips(report, kernel) if joined else lambda block: block.trips or 1
            return one_pass(loops_of(report, kernel, "requests")[loop], trips)[0]

        feeding = writing = [interval(feed, 0), interval(collect, 0)]
        if joined:
            # Beside a Learner `feed` makes updates of its results in loops of their own, before that for all else, and
            # `collect` sends the Learner what is sampled, in loops that updates pass by.
            feeding = [interval(feed, -1), interval(collect, 0)]
            loops = range(len(loops_of(report, feed, "requests")))
            writing = [*(interval(feed, loop) for loop in loops), _passing_by(report, collect, 0)[0]]
        # A search looks at all children but one; the loop is gone where the compiler unrolled it. Only samples search.
        searching = [
            one_pass(loops_of(report, kernel, "requests")[-1], lambda block: block.trips or tree.fanout - 1)
            for kernel in stages[1:]
        ]
        sampling = _Stages([_passing_by(report, stages[0], -1), *searching])
        # Of updates the root has a loop of its own, once for each change that comes back.
        root = one_pass(loops_of(report, stages[0], "requests")[-1], lambda block: block.trips or 1)
        update = _Stages([root, *(_passing_by(report, kernel, -1) for kernel in stages[1:])])
        return cls(tree, frequency_mhz, sampling.timing(feeding), update.timing(writing, passes=2))

    def microseconds(self, cycles: float) -> float:
        """How long `cycles` take at the report's clock."""
        return cycles / self.frequency_mhz

    def cell(self, batch_size: int, insertions: int) -> ReplayCell:
        """T_RM of one iteration (PEARL Eq. 4 and 5 with the report's cycles), without T_comm."""
        cycles = (
            self.sampling.cycles(self.tree.depth, batch_size),
            self.update.cycles(self.tree.depth, insertions),
            self.update.cycles(self.tree.depth, batch_size),
        )
        sample, insert, update = (imported(self.microseconds(count)) for count in cycles)
        return ReplayCell(sample, insert, update, self.tree.fanout, workers=self.tree.depth)

    def measurements(self) -> Mapping[str, Measurement]:
        """The store's form: a cycle, and for sampling and updates what `StageTiming` has, in microseconds."""
        cycles = [1, *dataclasses.astuple(self.sampling), *dataclasses.astuple(self.update)]
        return {name: imported(self.microseconds(count)) for name, count in zip(_NAMES, cycles, strict=True)}

    @classmethod
    def from_measurements(cls, tree: ReplayTree, found: Mapping[str, Measurement]) -> ReportedReplay | None:
        """What `measurements` wrote; None where it is something else."""
        if not set(_NAMES) <= set(found) or cycle_in(found) is None:
            return None
        cycle_us, *times_us = (found[name].value_us for name in _NAMES)
        cycles = [round(time_us / cycle_us) for time_us in times_us]
        return cls(tree, 1 / cycle_us, StageTiming(*cycles[:3]), StageTiming(*cycles[3:]))

    def __str__(self) -> str:
        each = (
            f"{name} every {timing.interval_cycles:,} cycles"
            for name, timing in (("samples", self.sampling), ("updates", self.update))
        )
        return f"{self.tree.depth} levels, {', '.join(each)}, {self.frequency_mhz:,.1f} MHz"


# --- out of the report -----------------------------------------------------------------------------------------------


def _kernels_of(report: VendorReport, tree: ReplayTree) -> tuple[list[KernelReport], KernelReport, KernelReport, bool]:
    """The levels, the root first, `feed` and `collect`; and whether a Learner is joined to them."""
    stages: dict[int, KernelReport] = {}
    bridges: dict[str, KernelReport] = {}
    beside = 0
    for kernel in report.kernels:
        match = _KERNEL.search(kernel.name)
        if match is None and _BESIDE.search(kernel.name):
            beside += 1
        elif match is None:
            raise VendorReportError(
                f"{report.path}: expected the Replay Manager's kernels ({_OURS}); found {kernel.name!r}. Import "
                "reports of kernels/sycl/board."
            )
        elif match["bridge"]:
            bridges[match["bridge"]] = kernel
        else:
            stages[int(match["level"])] = kernel
    if (
        len(bridges) != 2
        or len(bridges) + len(stages) + beside != len(report.kernels)
        or sorted(stages) != [*range(len(stages))]
    ):
        names = ", ".join(kernel.name for kernel in report.kernels) or "none"
        raise VendorReportError(f"{report.path}: expected the kernels {_OURS}, each once; found {names}.")
    if len(stages) != tree.depth + 1:
        raise VendorReportError(
            f"{report.path}: expected {tree.depth} levels below the root, those of {tree.capacity:,} slots with fanout "
            f"{tree.fanout}; found {len(stages) - 1}. Give the capacity and the fanout that it was compiled for "
            "(PEARL_CAPACITY, PEARL_FANOUT)."
        )
    return [stages[level] for level in sorted(stages)], bridges["feed"], bridges["collect"], beside > 0


def _passing_by(report: VendorReport, kernel: KernelReport, loop: int) -> tuple[int, float]:
    """One pass of requests that enter no loop inside."""
    return one_pass(loops_of(report, kernel, "requests")[loop], lambda _: None)


@dataclass(frozen=True)
class _Stages:
    """Interval and latency in cycles of each level, the root's first."""

    cycles: list[tuple[int, float]]

    def timing(self, bridges: Sequence[int], passes: int = 1) -> StageTiming:
        """As the model has it: the slowest stage's interval, the mean level below the root, and the root beside them.

        What the bridges wait for in host memory is T_comm, which Eq. 7 adds: here they count by their intervals.
        """
        (_, root), *levels = self.cycles
        slowest = max(interval for interval, _ in self.cycles) * passes
        level = math.ceil(sum(latency for _, latency in levels) * passes / len(levels))
        return StageTiming(max(slowest, *bridges), level, math.ceil(root * passes))
