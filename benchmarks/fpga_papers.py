"""The papers' designs of an FPGA as rows of a matrix, for comparisons with the numbers that the papers print.

Programs run neither: `composer.modelled_rows.fpga_row` has the row of the design that they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from composer.fpga.learner_pipeline import LearnerPipeline
from composer.fpga.model import FpgaPart, ReplayTree, SharedDesign, explore, printed_learner, share
from composer.matrix import LearnerCell, MatrixRow, MissingCell, PairCell, ReplayCell
from composer.measurement import Measurement
from composer.modelled_rows import FPGA_LEARNER, ModelledRow, ModelledWork, fpga_row
from composer.platform import OWN_MEMORY_LATENCY_US, own_memory
from pearl.devices.description import Device
from pearl.errors import CapacityError, ConfigurationError


def papers_row(device: Device, work: ModelledWork, *, printed: bool = False) -> ModelledRow:
    """The row of an FPGA with the pipelines of the papers' drawings, by `composer.fpga.model`.

    The Replay Manager is that of `kernels/rtl`, with the fastest fitting fanout, lanes and copy of the leaves; the
    Learner has its weights on chip and whole multipliers for each unit. `printed` uses PEARL Eq. 2 to 6 as printed
    instead of the cycles of the pipelines. A primitive that does not fit is a MissingCell with the reason.
    """
    return _Papers(device, FpgaPart.from_device(device), work, printed).row()


@dataclass(frozen=True)
class _Papers:
    device: Device
    part: FpgaPart
    work: ModelledWork
    printed: bool

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
        storage = fpga_row(self.device, self.work).row.storage
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
        sample, insert, write = (Measurement.modelled(self.part.microseconds(count)) for count in cycles)
        return ReplayCell(sample, insert, write, tree.fanout, workers=tree.depth)

    def _learner(self, pipeline: LearnerPipeline, replay_kb: float = 0.0) -> tuple[LearnerCell, str]:
        batch = self.work.batch_size
        if self.printed:
            letter = printed_learner(pipeline, self.part, batch, replay_kb)
            text = f"DP {letter.dp}, T_stage {letter.stage_cycles:,.1f} cycles"
            return self._learner_cell(letter.cycles, letter.dp), text
        design = explore(pipeline, self.part, batch)
        return self._learner_cell(design.cycles, design.dp), str(design)

    def _learner_cell(self, cycles: float, dp: int) -> LearnerCell:
        return LearnerCell(
            Measurement.modelled(self.part.microseconds(cycles)), sub_batches=dp, implementation=FPGA_LEARNER
        )

    def _pair(self, trees: Sequence[tuple[ReplayTree, ReplayCell]], pipeline: LearnerPipeline) -> tuple[PairCell, str]:
        """The fastest pair of a tree and a Learner that fit together."""
        if self.printed:
            tree, replay = trees[0]
            learner, text = self._learner(pipeline, tree.resources(self.part).sram_kb)
            return PairCell(replay, learner), text
        batch = self.work.batch_size
        alone = explore(pipeline, self.part, batch).cycles
        best: tuple[float, SharedDesign, ReplayCell] | None = None
        reason: CapacityError | None = None

        def least(tree: ReplayTree) -> int:
            return tree.sampling_cycles(1) + tree.update_cycles(batch) + alone

        for tree, replay in sorted(trees, key=lambda found: least(found[0])):
            if best is not None and least(tree) >= best[0]:
                break
            try:
                shared = share(tree, pipeline, self.part, batch)
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
        streamed = dataclasses.replace(
            replay, sample=Measurement.modelled(self.part.microseconds(shared.exposed_sampling_cycles))
        )
        design = shared.learner
        text = f"{design}; the Replay Manager of {self._tree_text(shared.tree)}"
        slower = max(shared.tree.shape.sample_cycles, design.item_interval_cycles)
        gather = Measurement.modelled(self._streamed_gather_us(self.part.microseconds(slower)))
        return PairCell(streamed, self._learner_cell(design.cycles, design.dp), gather), text

    def _streamed_gather_us(self, interval_us: float) -> float:
        """The time by which the gather delays a Learner to which each row streams, one every `interval_us` at best."""
        row_us = 2 * self.work.transition_bytes / (own_memory(self.device).bandwidth_gbps * 1e3)
        return OWN_MEMORY_LATENCY_US + row_us + max(0.0, row_us - interval_us) * (self.work.batch_size - 1)
