"""Cycles of the Replay Manager's stages on an FPGA by a vendor's report, at the report's clock.

The report states the interval and the latency of requests for each kernel of `kernels/sycl/board`. The cycles of a
batch follow from them as in `composer.fpga.replay_timing`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from composer.fpga.model import ReplayTree
from composer.fpga.replay_timing import ReplayTiming, StageTiming
from composer.fpga.reported_stages import clock_of, cycle_in, imported, known_trips, loops_of, one_pass
from composer.fpga.vendor_report import BlockReport, KernelReport, VendorReport
from composer.matrix import ReplayCell
from composer.measurement import Measurement
from pearl.errors import VendorReportError

_KERNEL = re.compile(r"pearl_replay_(?:level(?P<level>[0-9]{1,2})|(?P<bridge>feed|collect))(?![0-9a-z])")
_LEARNER_KERNEL = re.compile(r"pearl_learner_[0-9a-z_]+")
_EXPECTED = "pearl_replay_feed, pearl_replay_level0, level1, ... and pearl_replay_collect"
_Trips: TypeAlias = "Callable[[BlockReport], int | None]"

_NAMES = (
    "cycle",
    *(f"{operation}_{part}" for operation in ("sample", "update") for part in ("interval", "level", "head")),
)


@dataclass(frozen=True)
class ReportedReplay:
    """The pipeline of `tree` by a report: its clock, and the cycles of its stages."""

    tree: ReplayTree
    frequency_mhz: float
    sampling: StageTiming
    update: StageTiming

    @classmethod
    def of(cls, report: VendorReport, tree: ReplayTree) -> ReportedReplay:
        """Read the Replay Manager of `tree`.

        Raises VendorReportError for a report on another design or tree, and for a report without initiation intervals;
        CapacityError where the design does not fit the part that it was compiled for.
        """
        stages, feed, collect, joined = _kernels_of(report, tree)
        frequency_mhz = clock_of(report, "fewer slots (PEARL_CAPACITY)")

        def timing_of(kernel: KernelReport, loop: int, trips: _Trips) -> tuple[int, float]:
            return one_pass(loops_of(report, kernel, "requests")[loop], trips)

        def interval(kernel: KernelReport, loop: int) -> int:
            return timing_of(kernel, loop, known_trips(report, kernel) if joined else _once)[0]

        feeding = writing = [interval(feed, 0), interval(collect, 0)]
        if joined:
            # With a Learner, `feed` turns its results into updates in separate loops, before the loop for all other
            # requests. `collect` sends samples to the Learner in inner loops, which updates skip.
            feeding = [interval(feed, -1), interval(collect, 0)]
            loops = range(len(loops_of(report, feed, "requests")))
            writing = [*(interval(feed, loop) for loop in loops), timing_of(collect, 0, _skipped)[0]]
        root, *levels = stages
        # Only samples search. A search reads all children but one, in a loop unless the compiler unrolled it.
        searching = [timing_of(level, -1, lambda block: block.trips or tree.fanout - 1) for level in levels]
        sampling = StageTiming.of([timing_of(root, -1, _skipped), *searching], feeding)
        # The root has a separate loop for updates, with one iteration for each difference that comes back.
        adding = [timing_of(root, -1, _once), *(timing_of(level, -1, _skipped) for level in levels)]
        return cls(tree, frequency_mhz, sampling, StageTiming.of(adding, writing, passes=2))

    @property
    def timing(self) -> ReplayTiming:
        """The cycles of sampling and of updates."""
        return ReplayTiming(self.sampling, self.update)

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
        return ReplayCell(sample, insert, update, self.tree.fanout)

    def measurements(self) -> Mapping[str, Measurement]:
        """What the calibration store keeps, in microseconds: a cycle, and `StageTiming` of sampling and of updates."""
        cycles = [1, *dataclasses.astuple(self.sampling), *dataclasses.astuple(self.update)]
        return {name: imported(self.microseconds(count)) for name, count in zip(_NAMES, cycles, strict=True)}

    @classmethod
    def from_measurements(cls, tree: ReplayTree, found: Mapping[str, Measurement]) -> ReportedReplay | None:
        """The inverse of `measurements`; None for other measurements."""
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


# --- from the report -------------------------------------------------------------------------------------------------


def _kernels_of(report: VendorReport, tree: ReplayTree) -> tuple[list[KernelReport], KernelReport, KernelReport, bool]:
    """The levels from the root on, `feed`, `collect`, and whether a Learner is joined to them."""
    stages: dict[int, KernelReport] = {}
    bridges: dict[str, KernelReport] = {}
    learner_kernels = 0
    for kernel in report.kernels:
        match = _KERNEL.search(kernel.name)
        if match is None and _LEARNER_KERNEL.search(kernel.name):
            learner_kernels += 1
        elif match is None:
            raise VendorReportError(
                f"{report.path}: expected the Replay Manager's kernels ({_EXPECTED}); found {kernel.name!r}. Import "
                "reports of kernels/sycl/board."
            )
        elif match["bridge"]:
            bridges[match["bridge"]] = kernel
        else:
            stages[int(match["level"])] = kernel
    if (
        len(bridges) != 2
        or len(bridges) + len(stages) + learner_kernels != len(report.kernels)
        or sorted(stages) != [*range(len(stages))]
    ):
        names = ", ".join(kernel.name for kernel in report.kernels) or "none"
        raise VendorReportError(f"{report.path}: expected the kernels {_EXPECTED}, each once; found {names}.")
    if len(stages) != tree.depth + 1:
        raise VendorReportError(
            f"{report.path}: expected {tree.depth} levels below the root, those of {tree.capacity:,} slots with fanout "
            f"{tree.fanout}; found {len(stages) - 1}. Give the capacity and the fanout that it was compiled for "
            "(PEARL_CAPACITY, PEARL_FANOUT)."
        )
    return [stages[level] for level in sorted(stages)], bridges["feed"], bridges["collect"], learner_kernels > 0


def _once(loop: BlockReport) -> int:
    return loop.trips or 1


def _skipped(_: BlockReport) -> None:
    return None
