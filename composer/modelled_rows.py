"""Rows of the matrix without measurements: FPGAs by their model, absent CPUs and GPUs by a roofline with overheads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from composer.fpga.learner_pipeline import LearnerPipeline, TensorUnit
from composer.fpga.learner_program import LearnerProgram
from composer.fpga.model import FpgaPart, ReplayTree, missing_columns
from composer.fpga.nominal_kernels import nominal_replay, submit_interval
from composer.fpga.program_design import ProgramDesign, ProgramSpace, program_tree, replay_resources
from composer.matrix import Cell, LearnerCell, MatrixRow, MissingCell, PairCell, ReplayCell, StorageCell
from composer.measurement import Measurement
from composer.platform import OWN_MEMORY_LATENCY_US, own_memory
from pearl.backends import AUTO, backend_of, fpga, model, null
from pearl.backends.model.device import GpuParameters, ProcessorParameters, model_parameters
from pearl.backends.null.device import NullTimes
from pearl.devices.description import Device
from pearl.errors import CapacityError, ConfigurationError

FPGA_LEARNER = "fpga"  # the implementation whose pipeline is modelled
ROOFLINE_LEARNER = "modelled"

_BARRIER_US = 0.5  # of one operation, per doubling of the threads
_LANES = 128  # of one multiprocessor of a GPU
_CHILDREN_PER_LINE = 16  # priorities in one memory access; sums are twice as large


@dataclass(frozen=True)
class ModelledWork:
    """The work of one iteration: batch size, inserted transitions and their size in bytes, tree and Learner.

    One of `fanouts` is chosen. `pipeline` counts the Learner's work, `program` is the Learner that programs run on an
    FPGA; where one is unknown it is the reason in words. `no_replay` and `no_learner` are the reasons why the device
    cannot run a primitive, if it cannot. `implementation` is the forced implementation of the Learner.
    """

    batch_size: int
    insertions: int
    transition_bytes: int
    capacity: int
    fanouts: tuple[int, ...]
    pipeline: LearnerPipeline | str
    program: LearnerProgram | str = "its program is not stated"
    no_replay: str | None = None
    no_learner: str | None = None
    implementation: str = AUTO


@dataclass(frozen=True)
class ModelledRow:
    """A row, and a line of text for each design in it; `modelled` unless the device CSV states the times."""

    row: MatrixRow
    designs: tuple[str, ...] = ()
    modelled: bool = True


def _us(value_us: float) -> Measurement:
    return Measurement.modelled(value_us)


def _memory_storage(device: Device, work: ModelledWork, overhead_us: float) -> StorageCell:
    """A Data Storage as fast as the device's memory; each row is read and written once."""
    bytes_per_us = own_memory(device).bandwidth_gbps * 1e3
    gather, store = (
        _us(overhead_us + 2 * rows * work.transition_bytes / bytes_per_us)
        for rows in (work.batch_size, work.insertions)
    )
    return StorageCell(gather, store)


def _nothing(device: str, reason: str) -> ModelledRow:
    missing = MissingCell(reason)
    return ModelledRow(MatrixRow(device, missing, missing, missing))


# --- null ------------------------------------------------------------------------------------------------------------


def stated_row(device: Device, work: ModelledWork) -> ModelledRow:
    """The row of a device with its times in the selector."""
    times = NullTimes.parse(device.selector)

    def cells(factor: float) -> tuple[ReplayCell, LearnerCell]:
        sample, insert, update, step = (
            _us(value_us * factor) for value_us in (times.sample_us, times.insert_us, times.update_us, times.learner_us)
        )
        return ReplayCell(sample, insert, update, work.fanouts[0]), LearnerCell(step, implementation="null")

    replay, learner = cells(1.0)
    pair, storage = PairCell(*cells(times.sharing)), StorageCell(_us(0.0), _us(0.0))  # the stated times include it
    return ModelledRow(MatrixRow(device.name, replay, learner, pair, storage=storage), modelled=False)


# --- FPGA ------------------------------------------------------------------------------------------------------------


def fpga_row(device: Device, work: ModelledWork) -> ModelledRow:
    """The row of an FPGA by `composer.fpga.program_design`: the design that programs instantiate there.

    Fanout, DP and UF are those of the fastest design that fits. A primitive that does not fit, or lacks a column of the
    device CSV, is a MissingCell with the reason.
    """
    if (reason := why_not_modelled(device)) is not None:
        return _nothing(device.name, reason)
    return _Fpga(device, FpgaPart.from_device(device), work).row()


def why_not_modelled(device: Device) -> str | None:
    """Which columns of the device CSV an FPGA's row lacks; None if it has all."""
    if not (missing := missing_columns(device)):
        return None
    emulated = backend_of(device).emulated(device)
    why = (
        "the FPGA emulator only shows that kernels work, how long they take there means nothing"
        if emulated
        else "FPGAs are modelled, not measured"
    )
    columns = f"{', '.join(missing)} of {'the board it stands for' if emulated else device.name}"
    return f"{why}: fill {columns} in the device CSV to have it modelled"


def possible_fpga_row(device: Device, work: ModelledWork) -> ModelledRow:
    """The row of an FPGA without the primitives that its design lacks, or that no kernel implements there."""
    found = fpga_row(device, work)
    lacking: dict[str, MissingCell] = {}
    if work.no_replay is not None:
        lacking["replay"] = lacking["pair"] = MissingCell(work.no_replay)
    no_learner = work.no_learner
    if work.implementation not in (AUTO, FPGA_LEARNER):
        no_learner = f"no {work.implementation} Learner for FPGAs"
    if no_learner is not None:
        lacking["learner"] = lacking["pair"] = MissingCell(no_learner)
    return dataclasses.replace(found, row=dataclasses.replace(found.row, **lacking))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Fpga:
    device: Device
    part: FpgaPart
    work: ModelledWork

    def row(self) -> ModelledRow:
        designs: list[str] = []
        replay, learner, pair = (self._cell(make, designs) for make in (self._replay, self._learner, self._pair))
        storage = _memory_storage(self.device, self.work, OWN_MEMORY_LATENCY_US)
        row = MatrixRow(self.part.name, replay, learner, pair, storage=storage)  # type: ignore[arg-type]
        return ModelledRow(row, tuple(designs))

    def _cell(self, make: Callable[[], tuple[Cell, str]], designs: list[str]) -> Cell:
        try:
            cell, design = make()
        except (CapacityError, ConfigurationError) as error:
            return MissingCell(str(error))
        designs.append(design)
        return cell

    def _replay(self) -> tuple[ReplayCell, str]:
        tree, cell = min(
            ((tree, self._replay_cell(tree)) for tree in self._trees),
            key=lambda found: found[1].sample.value_us + found[1].update.value_us,
        )
        return cell, f"Replay Manager of {self._tree_text(tree)}"

    @functools.cached_property
    def _trees(self) -> list[ReplayTree]:
        """The trees that the kernels can have and that fit; CapacityError with the smallest one's reason if none is."""
        found, reasons = [], []
        for fanout in sorted(self.work.fanouts, reverse=True):  # the largest takes the least memory
            try:
                found.append(program_tree(self.work.capacity, fanout, self.part))
            except CapacityError as error:
                reasons.append(error)
        if not found:
            raise reasons[0]
        return found

    def _tree_text(self, tree: ReplayTree) -> str:
        return f"fanout {tree.fanout}, {tree.depth} levels, {replay_resources(tree, self.part).sram_kb:,.0f} KB"

    def _replay_cell(self, tree: ReplayTree) -> ReplayCell:
        timing, batch = nominal_replay(tree.fanout, tree.depth), self.work.batch_size
        sample = timing.sampling.cycles(tree.depth, batch)
        insert, update = (timing.update.cycles(tree.depth, count) for count in (self.work.insertions, batch))
        return ReplayCell(self._us(sample), self._us(insert), self._us(update), tree.fanout)

    @functools.cached_property
    def _space(self) -> ProgramSpace:
        if isinstance(self.work.program, str):
            raise ConfigurationError(f"the Learner on an FPGA cannot be modelled: {self.work.program}")
        return program_space(self.work.program, self.part, self.work.batch_size, self.device)

    def _learner(self) -> tuple[LearnerCell, str]:
        design = self._space.alone()
        return learner_cell(design, self._us(design.cycles)), f"Learner alone: {design}"

    def _pair(self) -> tuple[PairCell, str]:
        """The fastest pair of a tree and a Learner that fit together, with the insertions between iterations."""
        trees = self._trees
        space = self._space
        best: tuple[int, ReplayTree, ProgramDesign] | None = None
        reason: CapacityError | None = None
        for tree in trees:
            try:
                design = space.with_replay(tree)
            except CapacityError as error:
                reason = error
                continue
            insertion = nominal_replay(tree.fanout, tree.depth).update.cycles(tree.depth, self.work.insertions)
            if best is None or design.cycles + insertion < best[0]:
                best = design.cycles + insertion, tree, design
        if best is None:
            raise CapacityError(f"both do not fit one FPGA: {reason}")
        _, tree, design = best
        joined = design.joined
        assert joined is not None
        replay = dataclasses.replace(
            self._replay_cell(tree), sample=self._us(joined.sampling), update=self._us(joined.update)
        )
        learner = learner_cell(design, self._us(joined.learner))
        interval = max(
            nominal_replay(tree.fanout, tree.depth, submit_interval(space.program)).sampling.interval_cycles,
            design.timing.item_interval_cycles,
        )
        gather = _us(self._streamed_gather_us(self.part.microseconds(interval)))
        text = f"Learner beside the Replay Manager: {design}; the Replay Manager of {self._tree_text(tree)}"
        return PairCell(replay, learner, gather, joined=True), text

    def _us(self, cycles: float) -> Measurement:
        return _us(self.part.microseconds(cycles))

    def _streamed_gather_us(self, interval_us: float) -> float:
        """The time by which the gather delays a Learner to which each row streams, one every `interval_us` at best."""
        row_us = 2 * self.work.transition_bytes / (own_memory(self.device).bandwidth_gbps * 1e3)
        return OWN_MEMORY_LATENCY_US + row_us + max(0.0, row_us - interval_us) * (self.work.batch_size - 1)


def program_space(program: LearnerProgram, part: FpgaPart, batch_size: int, device: Device) -> ProgramSpace:
    """The designs of `program` on `device`, whose row is `part`."""
    return ProgramSpace(program, part, batch_size, own_memory(device).bandwidth_gbps * 1e3 / part.clock_mhz)


def learner_cell(design: ProgramDesign, step: Measurement) -> LearnerCell:
    """The cell of a design, with the parameters that its program states."""
    return LearnerCell(step, sub_batches=design.copies, implementation=FPGA_LEARNER, unroll=design.unroll)


# --- CPU and GPU -----------------------------------------------------------------------------------------------------


def processor_row(device: Device, work: ModelledWork) -> ModelledRow:
    """The row of an absent CPU or GPU, by a roofline with an overhead for each operation.

    A MissingCell names the columns to fill where `cores`, `clock_mhz` or `memory_bandwidth_gbps` is empty.
    """
    wanted = ("cores", "clock_mhz", "memory_bandwidth_gbps")
    if missing := [column for column in wanted if not getattr(device, column)]:
        return _nothing(
            device.name, f"fill {', '.join(missing)} of {device.name} in the device CSV to have it modelled"
        )
    parameters = model_parameters(device.kind, device.selector)
    assert isinstance(parameters, ProcessorParameters)
    roofline = _Roofline(device, work, parameters)
    storage = _memory_storage(device, work, parameters.operation_us)
    replay = min(
        (roofline.replay(fanout) for fanout in work.fanouts),
        key=lambda cell: cell.sample.value_us + cell.update.value_us,
    )
    if isinstance(work.pipeline, str):
        missing_learner = MissingCell(f"the Learner cannot be modelled: {work.pipeline}")
        return ModelledRow(MatrixRow(device.name, replay, missing_learner, missing_learner, storage=storage))
    learner = roofline.learner(work.pipeline)
    return ModelledRow(MatrixRow(device.name, replay, learner, PairCell(replay, learner), storage=storage))


@dataclass(frozen=True)
class _Roofline:
    device: Device
    work: ModelledWork
    parameters: ProcessorParameters

    @property
    def _gpu(self) -> bool:
        return isinstance(self.parameters, GpuParameters)

    @property
    def _bytes_per_us(self) -> float:
        return (self.device.memory_bandwidth_gbps or 0.0) * 1e3

    @property
    def _flop_per_us(self) -> float:
        """Floating-point operations of one core."""
        return (self.device.clock_mhz or 0.0) * self.parameters.flop_per_cycle

    def replay(self, fanout: int) -> ReplayCell:
        """Requests to the tree."""
        batch, p = self.work.batch_size, self.parameters
        levels = ReplayTree(self.work.capacity, fanout).depth
        lines = levels * max(1, fanout // _CHILDREN_PER_LINE)
        sample_us = p.request_us + lines * batch * p.sample_ns / 1e3 + levels * p.level_us

        def update_us(items: int) -> float:
            passes = 1 if self._gpu else levels
            return p.request_us + passes * items * p.update_ns / 1e3 + levels * p.level_us

        return ReplayCell(_us(sample_us), _us(update_us(self.work.insertions)), _us(update_us(batch)), fanout)

    def learner(self, pipeline: LearnerPipeline) -> LearnerCell:
        """All units in a row, and one update of the weights per tensor; on a CPU with the best count of threads."""
        if isinstance(p := self.parameters, GpuParameters):
            torch = dataclasses.replace(p, flop_per_cycle=p.torch_flop_per_cycle, operation_us=p.torch_operation_us)
            either = (self, dataclasses.replace(self, parameters=torch))
            return LearnerCell(
                _us(min(one._step_us(pipeline.units, 1) for one in either)), implementation=ROOFLINE_LEARNER
            )
        cores = self.device.cores or 1
        counts = [1 << k for k in range(cores.bit_length())]
        times = {threads: self._step_us(pipeline.units, threads) for threads in counts if threads <= cores}
        best = min(times, key=lambda threads: times[threads])
        return LearnerCell(_us(times[best]), threads=best, implementation=ROOFLINE_LEARNER)

    def _step_us(self, units: Sequence[TensorUnit], threads: int) -> float:
        total = 0.0
        for unit in units:
            total += self._operation_us(unit, threads)
            if unit.kind == "GA":  # update of its weights: reads gradient, weight and two moments, writes three
                total += self._overhead_us(threads, 7 * 4 * unit.words / self._bytes_per_us)
        return total

    def _operation_us(self, unit: TensorUnit, threads: int) -> float:
        batch = self.work.batch_size
        results = unit.words if unit.kind == "GA" else batch * unit.writes
        multiprocessors = self.device.cores or 1
        cores = multiprocessors * min(1.0, results / (_LANES * multiprocessors)) if self._gpu else threads
        compute_us = 2 * unit.macs * batch / (cores * self._flop_per_us)
        memory_us = 4 * (batch * (unit.reads + unit.writes) + unit.words) / self._bytes_per_us
        return self._overhead_us(threads, max(compute_us, memory_us))

    def _overhead_us(self, threads: int, work_us: float) -> float:
        """A GPU works while the host launches the next operation; a CPU's threads synchronise after each operation."""
        if self._gpu:
            return max(self.parameters.operation_us, work_us)
        return self.parameters.operation_us + _BARRIER_US * (threads.bit_length() - 1) + work_us


# The functions for rows without measurements, by `Backend.estimator`.
ESTIMATORS: Mapping[str, Callable[[Device, ModelledWork], ModelledRow]] = MappingProxyType(
    {null.ESTIMATOR: stated_row, fpga.ESTIMATOR: possible_fpga_row, model.ESTIMATOR: processor_row}
)


def follows_work(device: Device) -> bool:
    """Whether the device's row is modelled from the work, so that it is known for other batch sizes and fanouts."""
    return backend_of(device).estimator(device) in (fpga.ESTIMATOR, model.ESTIMATOR)
