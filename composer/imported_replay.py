"""The Replay Manager's times on an FPGA by a vendor's report: kept in the calibration store, cells of the matrix.

The report says for each kernel of the recipe in `kernels/sycl/board` how often it takes a request and how long one is
under way; the cycles of a batch are then those of `composer.fpga_model`, and the clock is the report's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer.calibration import CalibrationKey, CalibrationStore
from composer.fpga_model import FANOUTS, FpgaPart, ReplayTree, share
from composer.learner_pipeline import pipeline_of
from composer.matrix import AssignmentMatrix, MatrixRow, Measurement, MissingCell, PairCell, ReplayCell
from composer.platform import Platform
from composer.vendor_report import BlockReport, KernelReport, VendorReport, VendorResources
from pearl import __version__
from pearl.algorithms.trainer import make_trainer
from pearl.devices.description import Device
from pearl.devices.modelled import FpgaParameters
from pearl.errors import CapacityError, ConfigurationError, VendorReportError

if TYPE_CHECKING:
    from composer.profiling import Problem

_KERNEL = re.compile(r"pearl_replay_(?:level(?P<level>[0-9]{1,2})|(?P<bridge>feed|collect))(?![0-9a-z])")
_OURS = "pearl_replay_feed, pearl_replay_level0, level1, ... and pearl_replay_collect"
_NAMES = (
    "cycle",
    *(f"{operation}_{part}" for operation in ("sample", "update") for part in ("interval", "level", "head")),
)
_RAM_BLOCK_KB = FpgaParameters().block_kbit * 1024 / 8000


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
        stages, bridges = _kernels_of(report, tree)
        if report.frequency_mhz is None or any(kernel.blocks is None for kernel in report.kernels):
            raise VendorReportError(
                f"{report.path} has no {' and no '.join(report.missing)}: times cannot be told from it. Copy the whole "
                "folder of the report, or make it anew."
            )
        if over := report.total.exceeding(report.available):
            raise CapacityError(
                f"The design in {report.path} does not fit {report.device}: it takes {', '.join(over)}. Compile it for "
                "a larger part (PEARL_FPGA_DEVICE) or for fewer slots (PEARL_CAPACITY)."
            )
        feeding = [_one_request(_requests(kernel, report, last=False), 1)[0] for kernel in bridges]
        # A search looks at all children but one; the loop is gone where the compiler unrolled it. Only samples search.
        sampling = _Stages(
            [_one_request(_requests(k, report), tree.fanout - 1 if n else None) for n, k in enumerate(stages)]
        )
        # Of updates the root has a loop of its own, once for each change that comes back.
        update = _Stages([_one_request(_requests(k, report), None if n else 1) for n, k in enumerate(stages)])
        return cls(tree, report.frequency_mhz, sampling.timing(feeding), update.timing(feeding, passes=2))

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
        sample, insert, update = (_imported(self.microseconds(count)) for count in cycles)
        return ReplayCell(sample, insert, update, self.tree.fanout, workers=self.tree.depth)

    def measurements(self) -> Mapping[str, Measurement]:
        """The store's form: a cycle, and for sampling and updates what `StageTiming` has, in microseconds."""
        cycles = [1, *dataclasses.astuple(self.sampling), *dataclasses.astuple(self.update)]
        return {name: _imported(self.microseconds(count)) for name, count in zip(_NAMES, cycles, strict=True)}

    @classmethod
    def from_measurements(cls, tree: ReplayTree, found: Mapping[str, Measurement]) -> ReportedReplay | None:
        """What `measurements` wrote; None where it is something else."""
        if not set(_NAMES) <= set(found) or not found["cycle"].value_us:
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


def _imported(value_us: float) -> Measurement:
    return Measurement(value_us, value_us, value_us, 0, "imported")


# --- out of the report -----------------------------------------------------------------------------------------------


def _kernels_of(report: VendorReport, tree: ReplayTree) -> tuple[list[KernelReport], list[KernelReport]]:
    """The levels, the root first, and the kernels that bridge to host memory."""
    stages: dict[int, KernelReport] = {}
    bridges: dict[str, KernelReport] = {}
    for kernel in report.kernels:
        match = _KERNEL.search(kernel.name)
        if match is None:
            raise VendorReportError(
                f"{report.path}: expected the Replay Manager's kernels ({_OURS}); found {kernel.name!r}. Import "
                "reports of kernels/sycl/board."
            )
        if match["bridge"]:
            bridges[match["bridge"]] = kernel
        else:
            stages[int(match["level"])] = kernel
    if (
        len(bridges) != 2
        or len(bridges) + len(stages) != len(report.kernels)
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
    return [stages[level] for level in sorted(stages)], list(bridges.values())


def _requests(kernel: KernelReport, report: VendorReport, *, last: bool = True) -> BlockReport:
    """The loop that takes requests: a level's last, after those that clear its memory; of a bridge the first."""
    loops = [block for block in kernel.blocks or () if block.loop]
    if not loops:
        raise VendorReportError(
            f"{report.path}: expected a loop over requests in {kernel.name}; found none. A report of another version, "
            "or one that is not complete: make it anew."
        )
    return loops[-1 if last else 0]


def _one_request(loop: BlockReport, trips: int | None) -> tuple[int, float]:
    """Cycles from one request to the next, and those that one is under way.

    Blocks follow one another, and each is a pipeline of its own: a loop inside holds up the next request until its last
    iteration has begun. Where requests do not overlap, the next one waits for all of it. `trips` of a loop inside whose
    count the compiler does not know; None: the request passes such loops by.
    """
    interval, latency = float(loop.ii or 0), loop.latency_cycles
    for block in loop.blocks:
        if not block.loop:
            latency += block.latency_cycles
        elif trips is not None:
            count = block.trips or trips
            each, once = _one_request(block, trips)
            latency += (count - 1) * each + once
            interval = max(interval, count * each)
    return math.ceil(max(1.0, interval) if loop.ii is not None else latency), latency


@dataclass(frozen=True)
class _Stages:
    """Interval and latency in cycles of each level, the root's first."""

    cycles: list[tuple[int, float]]

    def timing(self, bridges: list[int], passes: int = 1) -> StageTiming:
        """As the model has it: the slowest stage's interval, the mean level below the root, and the root beside them.

        What the bridges wait for in host memory is T_comm, which Eq. 7 adds: here they count by their intervals.
        """
        (_, root), *levels = self.cycles
        slowest = max(interval for interval, _ in self.cycles) * passes
        level = math.ceil(sum(latency for _, latency in levels) * passes / len(levels))
        return StageTiming(max(slowest, *bridges), level, math.ceil(root * passes))


# --- into the store, and into the matrix -----------------------------------------------------------------------------


def import_report(report: VendorReport, device: Device, tree: ReplayTree, store: CalibrationStore) -> ReportedReplay:
    """Keep what `report` says of the Replay Manager of `tree` for `device`, a row of the device CSV; returns it.

    A composition with that row, that capacity and that fanout takes it. Raises what `ReportedReplay.of` raises,
    ConfigurationError for a row that is no FPGA, and CapacityError for one that is smaller than the design.
    """
    if device.kind != "fpga":
        raise ConfigurationError(
            f"{device.name} is a {device.kind}; the report is of an FPGA. Name a row of kind fpga."
        )
    found = ReportedReplay.of(report, tree)
    ram_blocks = None if device.sram_kb is None else device.sram_kb / _RAM_BLOCK_KB
    if over := report.total.exceeding(VendorResources(aluts=device.luts, ram_blocks=ram_blocks, dsps=device.dsp)):
        raise CapacityError(
            f"The design in {report.path} was compiled for {report.device} and takes more than the row {device.name} "
            f"has: {', '.join(over)}. Correct luts, dsp or sram_kb of the row, or import into the row of that part."
        )
    store.put(_key(device, tree), found.measurements())
    return found


def _key(device: Device, tree: ReplayTree) -> CalibrationKey:
    parameters = (("capacity", tree.capacity), ("fanout", tree.fanout))
    return CalibrationKey("fpga_report", device.fingerprint(), parameters, "", "", __version__, "", "")


def with_imported(
    matrix: AssignmentMatrix, platform: Platform, problem: Problem, store: CalibrationStore
) -> tuple[AssignmentMatrix, tuple[str, ...]]:
    """The matrix with the Replay Manager's times on FPGAs by imported reports, and a line in words for each.

    Beside a Learner on the same FPGA sampling counts by what it delays the Learner, at the report's clock.
    """
    if problem.replay.mode != "prioritized":
        return matrix, ()
    rows, lines = [], []
    for row in matrix.rows:
        device = platform.device(row.device)
        found = _known(device, problem, store) if device.kind == "fpga" else None
        if found is not None:
            row = _with_times(row, device, problem, found)
            lines.append(f"{device.name}: Replay Manager by an imported report, not modelled: {found}")
        rows.append(row)
    return dataclasses.replace(matrix, rows=tuple(rows)), tuple(lines)


def _known(device: Device, problem: Problem, store: CalibrationStore) -> ReportedReplay | None:
    fanout = problem.replay.fanout
    found = []
    for candidate in FANOUTS if fanout == "auto" else (int(fanout),):
        tree = ReplayTree(problem.replay.capacity, candidate)
        reported = ReportedReplay.from_measurements(tree, store.get(_key(device, tree)) or {})
        if reported is not None:
            found.append(reported)
    batch = problem.train.batch_size

    def both_us(reported: ReportedReplay) -> float:
        cell = reported.cell(batch, batch)
        return cell.sample.value_us + cell.update.value_us

    return min(found, key=both_us, default=None)


def _with_times(row: MatrixRow, device: Device, problem: Problem, found: ReportedReplay) -> MatrixRow:
    batch = problem.train.batch_size
    cell = found.cell(batch, min(problem.actors.env_count, problem.replay.capacity))
    if not isinstance(row.pair, PairCell):
        return dataclasses.replace(row, replay=cell)
    p = problem
    trainer = make_trainer(p.trainer_class, p.observation_space, p.action_space, settings=dict(p.settings))
    pair: PairCell | MissingCell
    try:
        shared = share(found.tree, pipeline_of(trainer), FpgaPart.from_device(device), batch)
    except CapacityError as error:  # the model chose another fanout
        pair = MissingCell(f"both do not fit one FPGA: {error}")
    else:
        sampling = found.sampling
        first = sampling.latency_cycles * found.tree.depth
        exposed = _imported(found.microseconds(shared.exposed_cycles(first, sampling.interval_cycles)))
        pair = dataclasses.replace(row.pair, replay=dataclasses.replace(cell, sample=exposed))
    return dataclasses.replace(row, replay=cell, pair=pair)
