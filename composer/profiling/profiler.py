"""Fills the assignment matrix: measures every primitive on every device, at the user's shapes and batch size."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from composer.absent import NotCalibratedError
from composer.contention import CoreSharing
from composer.matrix import (
    AssignmentMatrix,
    LearnerCell,
    LearnerOption,
    MatrixRow,
    MissingCell,
    PairCell,
    UnavailableDevice,
    UnsupportedLearner,
)
from composer.platform import usable
from composer.profiling.context import ProfilingContext
from composer.profiling.learner_column import learner_cell
from composer.profiling.messages import messages_us
from composer.profiling.pair_column import pair_cell
from composer.profiling.replay_column import replay_cell
from composer.profiling.side_by_side import SideBySide, side_by_side
from composer.profiling.storage_column import storage_cell
from composer.report import left_out_line
from pearl.backends import AUTO, backend_of, learners, runs_on
from pearl.devices.description import Device
from pearl.error_place import described
from pearl.errors import CapacityError, DeviceError, TrainerError

if TYPE_CHECKING:
    from composer.modelled_rows import ModelledWork

logger = logging.getLogger("pearl.composer")

_Cell = TypeVar("_Cell")


@dataclasses.dataclass
class Profiler(ProfilingContext):
    """Fills the matrix, a row per usable device and a module per column."""

    _side_by_side: dict[str, SideBySide] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def matrix(self) -> AssignmentMatrix:
        """Profile every usable device."""
        devices, unavailable = usable(self.platform)
        for learner in self._unsupported:
            line = left_out_line(learner)
            logger.info("%s.", line)
            self.report(line)
        rows = tuple(self._row(device) for device in devices)
        left_out = tuple(UnavailableDevice(d.name, reason) for d, reason in unavailable)
        return AssignmentMatrix(rows, left_out, (*self._unsupported, *self.slow))

    @functools.cached_property
    def messages_us(self) -> float:
        """Microseconds of the host's messages per iteration of setting 1; 0 where only the host is usable."""
        return messages_us(self)

    def side_by_side(self, matrix: AssignmentMatrix) -> SideBySide | None:
        """Several Learners at the same time, of the fastest implementation; None for one, or without one on the host.

        `matrix` is that of this profiler.
        """
        pair = None if self.problem.learners.count == 1 else self.fastest_pair(matrix)
        if pair is None:
            return None
        name = pair.learner.implementation
        if name not in self._side_by_side:
            count = self.problem.learners.count
            # With other nodes, at most one Learner for each core runs here; without, all run here and take turns.
            at_once = min(count, self.platform.host.cores or 1) if self.platform.nodes else count
            self._side_by_side[name] = side_by_side(self, pair, at_once)
        return self._side_by_side[name]

    def fastest_pair(self, matrix: AssignmentMatrix) -> PairCell | None:
        """The cell of both primitives on the host whose iteration is the shortest; None if there is none."""
        host = self.platform.host.name
        options = matrix[host].learners if host in matrix.devices else ()
        pairs = [option.pair for option in options if isinstance(option.pair, PairCell)]
        return min(pairs, key=lambda pair: pair.iteration_us, default=None)

    @property
    def sharing(self) -> CoreSharing | None:
        """How Learner and Actors share the host; None where no measured Learner runs on the host."""
        host = self.platform.host
        return self.sharing_on(host) if backend_of(host).host_cores == "threads" else None

    # --- the rows ---------------------------------------------------------------------------------------------------

    def _row(self, device: Device) -> MatrixRow:
        if (estimator := backend_of(device).estimator(device)) is not None:
            return self._estimated_row(device, estimator)
        absent = f"{device.name} is of another machine: its times are imported"
        self.report(absent if device.absent else f"profiling {device.name}")
        replay = self._tried(device, lambda: replay_cell(self, device))
        storage = self._tried(device, lambda: storage_cell(self, device))
        tried: list[LearnerCell | MissingCell] = []
        for name, least_us in self._implementations_by_bound(device):
            fastest_us = min((c.step.least_us for c in tried if isinstance(c, LearnerCell)), default=math.inf)
            if not self.too_slow(name, device, least_us, fastest_us):
                tried.append(self._tried(device, functools.partial(learner_cell, self, device, name, fastest_us)))
        cells = [cell for cell in tried if isinstance(cell, LearnerCell)]
        if not cells:
            failed = [cell for cell in tried if isinstance(cell, MissingCell)]
            missing = failed[0] if failed else MissingCell(self._why_no_learner(device))
            return MatrixRow(device.name, replay, missing, missing, storage=storage)
        cells.sort(key=lambda cell: cell.step.value_us)
        first, *others = (
            LearnerOption(cell, self._tried(device, functools.partial(pair_cell, self, device, replay, cell)))
            for cell in cells
        )
        return MatrixRow(device.name, replay, first.learner, first.pair, tuple(others), storage)

    def _tried(self, device: Device, work: Callable[[], _Cell]) -> _Cell | MissingCell:
        """The cell, or the reason where another device than the host failed; no program runs without the host."""
        try:
            return work()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, TrainerError) else error
            by_backend = isinstance(cause, Exception) and backend_of(device).is_failure(cause)
            failed = by_backend or isinstance(error, (CapacityError, DeviceError))
            if not failed or (device == self.platform.host and not isinstance(error, NotCalibratedError)):
                raise
            reason = f"{device.name} failed: {described(cause)}" if by_backend and cause is not None else str(error)
            if not isinstance(error, NotCalibratedError):
                logger.warning("A measurement failed on %s, which is left out of it: %s", device.name, reason)
            return MissingCell(reason.partition("\n")[0])

    def _estimated_row(self, device: Device, estimator: str) -> MatrixRow:
        """The row of a device on which nothing is measured."""
        from composer.modelled_rows import ESTIMATORS

        backend, spec = backend_of(device), self.problem.replay
        no_learner = None
        if backend.learners and not self._implementations(device):
            no_learner = self._why_no_learner(device)
        work = dataclasses.replace(
            self._work,
            no_replay=backend.replay_lacks(device, dataclasses.replace(spec, fanout=max(self.fanouts()))),
            no_learner=no_learner,
        )
        found = ESTIMATORS[estimator](device, work)
        if found.modelled:
            self.report(f"{device.name} is modelled, not measured")
        for design in found.designs:
            self.report(f"{device.name}: {design}")
        return found.row

    def with_reports(self, matrix: AssignmentMatrix) -> tuple[AssignmentMatrix, tuple[str, ...]]:
        """The matrix with the times of vendors' reports, of devices on which nothing is measured; a line for each."""
        if all(backend_of(device).estimator(device) is None for device in usable(self.platform)[0]):
            return matrix, ()
        from composer.fpga.imported_replay import with_imported

        return with_imported(matrix, self.platform, self.problem, self.store)

    @functools.cached_property
    def _work(self) -> ModelledWork:
        from composer.fpga.learner_pipeline import LearnerPipeline, pipeline_of
        from composer.fpga.learner_program import LearnerProgram
        from composer.modelled_rows import ModelledWork

        problem = self.problem
        pipeline: LearnerPipeline | str
        try:
            pipeline = pipeline_of(self.probe)
        except TrainerError as error:
            pipeline = str(error)
        program: LearnerProgram | str
        try:
            program = LearnerProgram.of(self.probe)
        except TrainerError as error:
            program = str(error)
        return ModelledWork(
            problem.train.batch_size,
            problem.insertions,
            problem.transition.nbytes,
            problem.replay.capacity,
            self.fanouts(),
            pipeline,
            program,
            implementation=problem.implementation,
        )

    # --- the implementations of the Learner -------------------------------------------------------------------------

    @functools.cached_property
    def _unsupported(self) -> tuple[UnsupportedLearner, ...]:
        """The implementations that cannot train the trainer."""
        found = ((name, learners()[name].supports(self.probe)) for name in self._wanted)
        return tuple(UnsupportedLearner(name, reason) for name, reason in found if reason is not None)

    @functools.cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The implementations to try: the forced one, or all that run on a usable device."""
        forced = self.problem.implementation
        if forced != AUTO:
            return (forced,)
        devices = usable(self.platform)[0]
        return tuple(name for name in learners() if any(runs_on(name, device) for device in devices))

    def _implementations(self, device: Device) -> list[str]:
        """The implementations of the Learner that run on the device and can train the trainer."""
        unsupported = {learner.implementation for learner in self._unsupported}
        return [name for name in self._wanted if name not in unsupported and runs_on(name, device)]

    def _implementations_by_bound(self, device: Device) -> list[tuple[str, float]]:
        """The same, each with the microseconds that its step takes at least; the lowest first."""
        bounds = [(name, learners()[name].least_step_us(self.probe)) for name in self._implementations(device)]
        return sorted(bounds, key=lambda bound: bound[1])

    def _why_no_learner(self, device: Device) -> str:
        here = [u for u in self._unsupported if runs_on(u.implementation, device)]
        if here:
            return "; ".join(left_out_line(learner) for learner in here)
        forced = self.problem.implementation
        return f"no {'' if forced == AUTO else f'{forced} '}Learner for {device.backend} in this version"
