"""Imports times on an FPGA from a vendor's report: into the calibration store, and from there into the matrix.

`composer.fpga.reported_replay` and `composer.fpga.reported_learner` read the times: of the Replay Manager, of the
Learner, or of both joined on one FPGA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from composer.calibration import VENDOR_REPORT, CalibrationKey, CalibrationStore
from composer.fpga.learner_program import LearnerProgram
from composer.fpga.model import FANOUTS, FpgaPart, ReplayTree
from composer.fpga.reported_learner import LearnerBuild, ReportedLearner, ReportedTraining
from composer.fpga.reported_replay import ReportedReplay
from composer.fpga.reported_stages import imported
from composer.fpga.vendor_report import VendorReport, VendorResources
from composer.matrix import AssignmentMatrix, MatrixRow, MissingCell, PairCell
from composer.measurement import Measurement
from composer.modelled_rows import FPGA_LEARNER, learner_cell, program_space
from composer.platform import Platform
from pearl import __version__
from pearl.algorithms.trainer import make_trainer
from pearl.backends import AUTO, backend_of
from pearl.backends.fpga import ESTIMATOR
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.fpga.replay import check_design
from pearl.backends.model.device import FpgaParameters
from pearl.devices.description import Device
from pearl.errors import CapacityError, ConfigurationError, VendorReportError

if TYPE_CHECKING:
    from composer.problem import Problem

_Reported = TypeVar("_Reported", ReportedReplay, ReportedLearner, ReportedTraining)

_RAM_BLOCK_KB = FpgaParameters().block_kbit * 1024 / 8000
_MOST_COPIES = 64  # the most that are looked up: PEARL_COPIES of kernels/sycl/board


# --- into the store --------------------------------------------------------------------------------------------------


def import_report(report: VendorReport, device: Device, tree: ReplayTree, store: CalibrationStore) -> ReportedReplay:
    """Store the times of the Replay Manager of `tree` for `device`, a row of the device CSV, and return them.

    A composition with this row, capacity and fanout uses them. Raises what `ReportedReplay.of` raises,
    ConfigurationError for a row that is no FPGA, and CapacityError for a row that is smaller than the design.
    """
    if any("pearl_learner_" in kernel.name for kernel in report.kernels):
        raise VendorReportError(
            f"{report.path} is of a design with a Learner: import it with import_learner (PEARL_DESIGN=learner) or "
            "import_training (PEARL_DESIGN=training)."
        )
    return _store(ReportedReplay.of(report, tree), report, device, _key(device, tree), store)


def import_learner(
    report: VendorReport, device: Device, build: LearnerBuild, store: CalibrationStore
) -> ReportedLearner:
    """Store the times of the Learner of `build` for `device`, and return them.

    A composition with this row, network, algorithm and batch size uses them. Raises as `import_report` does.
    """
    return _store(ReportedLearner.of(report, build), report, device, _key(device, build=build), store)


def import_training(
    report: VendorReport, device: Device, tree: ReplayTree, build: LearnerBuild, store: CalibrationStore
) -> ReportedTraining:
    """Store the times of both primitives, joined on one FPGA, for `device`, and return them.

    A composition that fits `tree` and `build` uses them where both primitives are placed on this device. Raises as
    `import_report` does.
    """
    return _store(ReportedTraining.of(report, tree, build), report, device, _key(device, tree, build), store)


def _store(
    found: _Reported, report: VendorReport, device: Device, key: CalibrationKey, store: CalibrationStore
) -> _Reported:
    if backend_of(device).estimator(device) != ESTIMATOR:
        raise ConfigurationError(
            f"{device.name} is a {device.kind}; the report is of an FPGA. Name a row of kind fpga."
        )
    ram_blocks = None if device.sram_kb is None else device.sram_kb / _RAM_BLOCK_KB
    if over := report.total.exceeding(VendorResources(aluts=device.luts, ram_blocks=ram_blocks, dsps=device.dsp)):
        raise CapacityError(
            f"The design in {report.path} was compiled for {report.device} and takes more than the row {device.name} "
            f"has: {', '.join(over)}. Correct luts, dsp or sram_kb of the row, or import into the row of that part."
        )
    store.put(key, found.measurements())
    return found


def _key(device: Device, tree: ReplayTree | None = None, build: LearnerBuild | None = None) -> CalibrationKey:
    sizes = {} if tree is None else {"capacity": tree.capacity, "fanout": tree.fanout}
    if build is not None:
        sizes |= {"batch": build.batch_size, "copies": build.copies}
    signature = "" if build is None else build.signature
    return CalibrationKey(VENDOR_REPORT, device.fingerprint(), tuple(sizes.items()), signature, "", __version__, "", "")


# --- into the matrix -------------------------------------------------------------------------------------------------


def with_imported(
    matrix: AssignmentMatrix, platform: Platform, problem: Problem, store: CalibrationStore
) -> tuple[AssignmentMatrix, tuple[str, ...]]:
    """The matrix with the times of imported reports in its FPGA rows, and a line of text for each report used.

    With a Learner on the same FPGA, sampling costs the time by which it delays the Learner, at the report's clock.
    """
    rows, lines = [], []
    for row in matrix.rows:
        device = platform.device(row.device)
        if backend_of(device).estimator(device) == ESTIMATOR:
            row, said = _Imports(device, problem, store).into(row)
            lines += [f"{device.name}: {line}" for line in said]
        rows.append(row)
    return dataclasses.replace(matrix, rows=tuple(rows)), tuple(lines)


class _Imports:
    """The imported times of one FPGA for a problem: the fastest design of each kind."""

    def __init__(self, device: Device, problem: Problem, store: CalibrationStore) -> None:
        self._device, self._problem, self._store = device, problem, store
        self._batch = problem.train.batch_size
        self._insertions = problem.insertions
        p = problem
        self._trainer = make_trainer(p.trainer_class, p.observation_space, p.action_space, settings=dict(p.settings))

    def into(self, row: MatrixRow) -> tuple[MatrixRow, list[str]]:
        lines = []
        trees, builds = self._trees(), self._builds()
        replays = (ReportedReplay.from_measurements(tree, self._stored(tree)) for tree in trees)
        if replay := min(filter(None, replays), key=self._replay_us, default=None):
            row = self._with_replay(row, replay)
            lines.append(f"Replay Manager by an imported report, not modelled: {replay}")
        learners = (ReportedLearner.from_measurements(build, self._stored(build=build)) for build in builds)
        if learner := min(filter(None, learners), key=lambda found: found.cell().step.value_us, default=None):
            row = dataclasses.replace(row, learner=learner.cell())
            lines.append(f"Learner by an imported report, not modelled: {learner}")
        joined = (
            ReportedTraining.from_measurements(tree, build, self._stored(tree, build))
            for tree in trees
            for build in builds
        )
        if training := min(filter(None, joined), key=self._pair_us, default=None):
            row = dataclasses.replace(row, pair=training.cell(self._insertions))
            lines.append(f"both by an imported report, not modelled: {training}")
        return row, lines

    def _stored(self, tree: ReplayTree | None = None, build: LearnerBuild | None = None) -> Mapping[str, Measurement]:
        return self._store.get(_key(self._device, tree, build)) or {}

    def _trees(self) -> list[ReplayTree]:
        replay = self._problem.replay
        try:
            check_design(replay)
        except ConfigurationError:  # no FPGA design has such a Replay Manager
            return []
        fanouts = FANOUTS if replay.fanout == "auto" else (int(replay.fanout),)
        return [ReplayTree(replay.capacity, fanout) for fanout in fanouts]

    def _builds(self) -> list[LearnerBuild]:
        forced = self._problem.implementation
        if forced not in (AUTO, FPGA_LEARNER) or FpgaLearner.supports(self._trainer) is not None:
            return []
        most = min(self._batch, _MOST_COPIES)
        one = LearnerBuild.of(self._trainer, self._batch)
        return [] if one is None else [dataclasses.replace(one, copies=copies) for copies in range(1, most + 1)]

    def _replay_us(self, reported: ReportedReplay) -> float:
        cell = reported.cell(self._batch, self._batch)
        return cell.sample.value_us + cell.update.value_us

    def _pair_us(self, reported: ReportedTraining) -> float:
        cell = reported.cell(self._insertions)
        return cell.replay.sample.value_us + cell.replay.update.value_us + cell.learner.step.value_us

    def _with_replay(self, row: MatrixRow, found: ReportedReplay) -> MatrixRow:
        cell = found.cell(self._batch, self._insertions)
        if not isinstance(row.pair, PairCell):
            return dataclasses.replace(row, replay=cell)
        pair: PairCell | MissingCell
        try:
            part = FpgaPart.from_device(self._device)
            space = program_space(LearnerProgram.of(self._trainer), part, self._batch, self._device)
            design = space.with_replay(found.tree)
        except CapacityError as error:  # the model chose another fanout
            pair = MissingCell(f"both do not fit one FPGA: {error}")
        else:
            joined = space.joined(design.timing, found.tree, found.timing)
            sample, update = (imported(found.microseconds(count)) for count in (joined.sampling, joined.update))
            learner = learner_cell(design, Measurement.modelled(part.microseconds(joined.learner)))
            pair = dataclasses.replace(
                row.pair, replay=dataclasses.replace(cell, sample=sample, update=update), learner=learner
            )
        return dataclasses.replace(row, replay=cell, pair=pair)
