"""Rows of the matrix without measurements: FPGAs by their model, absent CPUs and GPUs by a roofline with overheads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from composer.fpga.learner_pipeline import LearnerPipeline, TensorUnit
from composer.fpga.model import (
    Exploration,
    FpgaPart,
    ReplayTree,
    SharedDesign,
    explore,
    missing_columns,
    printed_learner,
    share,
)
from composer.matrix import LearnerCell, MatrixRow, Measurement, MissingCell, PairCell, ReplayCell, StorageCell
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

    One of `fanouts` is chosen. Where the trainer's work is unknown, `pipeline` is the reason in words. `no_replay` and
    `no_learner` are the reasons why the device cannot run a primitive, if it cannot. `implementation` is the forced
    implementation of the Learner.
    """

    batch_size: int
    insertions: int
    transition_bytes: int
    capacity: int
    fanouts: tuple[int, ...]
    pipeline: LearnerPipeline | str
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


def fpga_row(
    device: Device, work: ModelledWork, *, printed: bool = False, exploration: Exploration | None = None
) -> ModelledRow:
    """The row of an FPGA by `composer.fpga.model`.

    The Replay Manager is that of `kernels/rtl`, with the fastest fitting fanout, lanes and copy of the leaves.
    `printed` uses PEARL Eq. 2 to 6 as printed in the paper instead of the cycles of the pipelines. A primitive that
    does not fit, or lacks a column of the device CSV, is a MissingCell with the reason.
    """
    if missing := missing_columns(device):
        emulated = backend_of(device).emulated(device)
        why = (
            "the FPGA emulator only shows that kernels work, how long they take there means nothing"
            if emulated
            else "FPGAs are modelled, not measured"
        )
        columns = f"{', '.join(missing)} of {'the board it stands for' if emulated else device.name}"
        return _nothing(device.name, f"{why}: fill {columns} in the device CSV to have it modelled")
    return _Fpga(device, FpgaPart.from_device(device), work, printed, exploration).row()


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
    printed: bool
    exploration: Exploration | None

    def row(self) -> ModelledRow:
        designs: list[str] = []
        replay: ReplayCell | MissingCell
        learner: LearnerCell | MissingCell
        pair: PairCell | MissingCell
        trees: list[tuple[ReplayTree, ReplayCell]] = []
        try:
            trees = self._trees()
            replay = trees[0][1]
            designs.append(f"Replay Manager of {self._tree_text(trees[0][0])}")
        except (CapacityError, ConfigurationError) as error:
            replay = MissingCell(str(error))
        pipeline = self.work.pipeline
        if isinstance(pipeline, str):
            learner = pair = MissingCell(f"the Learner on an FPGA cannot be modelled: {pipeline}")
            return self._row(replay, learner, pair, designs)
        try:
            learner, text = self._learner(pipeline)
            designs.append(f"Learner alone: {text}")
        except CapacityError as error:
            learner = MissingCell(str(error))
        if isinstance(replay, MissingCell):
            pair = replay
        else:
            try:
                pair, text = self._pair(trees, pipeline)
                designs.append(f"Learner beside the Replay Manager: {text}")
            except CapacityError as error:
                pair = MissingCell(f"both do not fit one FPGA: {error}")
        return self._row(replay, learner, pair, designs)

    def _row(
        self,
        replay: ReplayCell | MissingCell,
        learner: LearnerCell | MissingCell,
        pair: PairCell | MissingCell,
        designs: Sequence[str],
    ) -> ModelledRow:
        storage = _memory_storage(self.device, self.work, OWN_MEMORY_LATENCY_US)
        return ModelledRow(MatrixRow(self.part.name, replay, learner, pair, storage=storage), tuple(designs))

    def _tree_text(self, tree: ReplayTree) -> str:
        lanes = "1 lane" if tree.lanes == 1 else f"{tree.lanes} lanes"
        copy = ", a copy of the leaves" if tree.leaf_copy else ""
        return f"{tree.depth} levels, {lanes}{copy}, {tree.resources(self.part).sram_kb:,.0f} KB"

    def _trees(self) -> list[tuple[ReplayTree, ReplayCell]]:
        """The trees that fit, with their cells; the fastest to sample and update first, then the smallest."""
        trees = (
            [ReplayTree(self.work.capacity, fanout) for fanout in self.work.fanouts]
            if self.printed
            else [tree for fanout in self.work.fanouts for tree in ReplayTree.choices(self.work.capacity, fanout)]
        )
        fitting = [tree for tree in trees if tree.fits(self.part)]
        if not fitting:
            min(trees, key=lambda tree: tree.resources(self.part).sram_kb).check_fits(self.part)

        def order(found: tuple[ReplayTree, ReplayCell]) -> tuple[float, float, float]:
            tree, cell = found
            used = tree.resources(self.part)
            return cell.sample.value_us + cell.update.value_us, used.sram_kb, used.luts

        return sorted(((tree, self._replay_cell(tree)) for tree in fitting), key=order)

    def _replay_cell(self, tree: ReplayTree) -> ReplayCell:
        sampling, update = (
            (tree.sampling_cycles_printed, tree.update_cycles_printed)
            if self.printed
            else (tree.sampling_cycles, tree.update_cycles)
        )
        cycles = (sampling(self.work.batch_size), update(self.work.insertions), update(self.work.batch_size))
        sample, insert, write = (_us(self.part.microseconds(count)) for count in cycles)
        return ReplayCell(sample, insert, write, tree.fanout)

    def _learner(self, pipeline: LearnerPipeline, replay_kb: float = 0.0) -> tuple[LearnerCell, str]:
        batch = self.work.batch_size
        if self.printed:
            letter = printed_learner(pipeline, self.part, batch, replay_kb)
            text = f"DP {letter.dp}, T_stage {letter.stage_cycles:,.1f} cycles"
            return self._learner_cell(letter.cycles, letter.dp), text
        design = explore(pipeline, self.part, batch, self.exploration)
        return self._learner_cell(design.cycles, design.dp), str(design)

    def _learner_cell(self, cycles: float, dp: int) -> LearnerCell:
        return LearnerCell(_us(self.part.microseconds(cycles)), sub_batches=dp, implementation=FPGA_LEARNER)

    def _pair(self, trees: Sequence[tuple[ReplayTree, ReplayCell]], pipeline: LearnerPipeline) -> tuple[PairCell, str]:
        """The fastest pair of a tree and a Learner that fit together."""
        if self.printed:
            tree, replay = trees[0]
            learner, text = self._learner(pipeline, tree.resources(self.part).sram_kb)
            return PairCell(replay, learner), text
        batch = self.work.batch_size
        alone = explore(pipeline, self.part, batch, self.exploration).cycles
        best: tuple[float, SharedDesign, ReplayCell] | None = None
        reason: CapacityError | None = None

        def least(tree: ReplayTree) -> int:
            return tree.sampling_cycles(1) + tree.update_cycles(batch) + alone

        for tree, replay in sorted(trees, key=lambda found: least(found[0])):
            if best is not None and least(tree) >= best[0]:
                break
            try:
                shared = share(tree, pipeline, self.part, batch, self.exploration)
            except CapacityError as error:
                reason = error
                continue
            cycles = shared.exposed_sampling_cycles + tree.update_cycles(batch) + shared.learner.cycles
            if best is None or cycles < best[0]:
                best = cycles, shared, replay
        if best is None:
            assert reason is not None
            raise reason
        _, shared, replay = best
        streamed = dataclasses.replace(replay, sample=_us(self.part.microseconds(shared.exposed_sampling_cycles)))
        design = shared.learner
        text = f"{design}; the Replay Manager of {self._tree_text(shared.tree)}"
        slower = max(shared.tree.shape.sample_cycles, design.item_interval_cycles)
        gather = _us(self._streamed_gather_us(self.part.microseconds(slower)))
        return PairCell(streamed, self._learner_cell(design.cycles, design.dp), gather), text

    def _streamed_gather_us(self, interval_us: float) -> float:
        """The time by which the gather delays a Learner to which each row streams, one every `interval_us` at best."""
        row_us = 2 * self.work.transition_bytes / (own_memory(self.device).bandwidth_gbps * 1e3)
        return OWN_MEMORY_LATENCY_US + row_us + max(0.0, row_us - interval_us) * (self.work.batch_size - 1)


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
        if self._gpu:
            return LearnerCell(_us(self._step_us(pipeline.units, 1)), implementation=ROOFLINE_LEARNER)
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
