"""Reports of Intel's FPGA compiler on the Learner, alone and joined to the Replay Manager: cycles, refusals, cells.

The reports in fixtures/fpga_report/learner_2023.prj and training_2025.prj were made for these tests, with the kernels
and loops of the recipe's programs and invented numbers: DQN on 4-20-2, alone in one copy, joined in two.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_vendor_report import BOARD, REPORTS, TREE, composed
from trainers import TinyDQN

from composer.calibration import CalibrationStore
from composer.fpga.imported_replay import import_learner, import_report, import_training
from composer.fpga.model import ReplayTree
from composer.fpga.reported_learner import LearnerBuild, ReportedLearner, ReportedTraining
from composer.fpga.vendor_report import VendorReport, read_vendor_report
from composer.matrix import MissingCell, PairCell
from pearl.algorithms import DDPG, DQN, SAC, TD3
from pearl.errors import CapacityError, ConfigurationError, VendorReportError

ALONE = LearnerBuild("dqn", (4, 20, 2), 32)
JOINED = dataclasses.replace(ALONE, copies=2)
# Cycles beside the items: WU 1 streams its weights and its target's (119 + 50 each) and takes 22 blocks of its
# gradient (21 + 30); both layers add up the norm (35 each); WU 1 moves 20 rows of 4 weights, each 3 after the one
# before (19 * 12 + 5 + 3 * 3 + 200), and 20 biases (19 * 3 + 200), and ends (2).
STREAM = 2 * (119 + 50)
BESIDE = STREAM + 51 + 2 * 35 + (442 + 257 + 2)
# The longest way: FP 1, FP 2, LOSS, BP 2, GA 1, the slowest stage: 20 rows, each 2 after the one before.
WAY = (20 + 19 + 40) + (20 + 1 + 40) + 90 + (22 + 8 + 30) + (25 + 38 + 12)
SLOWEST = 40


@pytest.fixture
def alone() -> VendorReport:
    return read_vendor_report(REPORTS / "learner_2023.prj")


@pytest.fixture
def joined() -> VendorReport:
    return read_vendor_report(REPORTS / "training_2025.prj")


def edited(tmp_path: Path, before: str, after: str, count: int = -1) -> VendorReport:
    """The report on the Learner alone, with a change to its loops."""
    copy = Path(shutil.copytree(REPORTS / "learner_2023.prj", tmp_path / "changed.prj"))
    file = copy / "reports" / "resources" / "json" / "loop_attr.json"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, count))
    return read_vendor_report(copy)


def without_trips(report: VendorReport, name: str) -> VendorReport:
    """The report, with a kernel in which no loop states its trip count."""

    def strip(block: Any) -> Any:
        return dataclasses.replace(block, trips=0, blocks=tuple(map(strip, block.blocks)))

    kernels = tuple(
        dataclasses.replace(kernel, blocks=tuple(map(strip, kernel.blocks or ()))) if name in kernel.name else kernel
        for kernel in report.kernels
    )
    return dataclasses.replace(report, kernels=kernels)


# --- cycles ----------------------------------------------------------------------------------------------------------


def test_a_step_is_the_makespan_of_its_items_and_the_weights_way(alone: VendorReport) -> None:
    for batch in (1, 32, 500):
        found = ReportedLearner.of(alone, dataclasses.replace(ALONE, batch_size=batch))
        assert found.step_cycles == BESIDE + WAY + (batch - 1) * SLOWEST
        cell = found.cell()
        assert cell.step.value_us == pytest.approx(found.step_cycles / 250)
        assert (cell.step.source, cell.sub_batches, cell.implementation) == ("imported", 1, "fpga")


def test_items_that_come_slowly_hold_up_the_step(tmp_path: Path) -> None:
    """`submit` reads each of an observation's 4 values: at 20 cycles each, slower than any stage."""
    found = ReportedLearner.of(
        edited(tmp_path, '"ii":"1","lt":"150.000000","pl":"Yes","tc":"4"', '"ii":"20","lt":"150","pl":"Yes","tc":"4"'),
        ALONE,
    )
    assert found.step_cycles == BESIDE - STREAM + WAY + 31 * 80, "weights stream while the first items come"


def test_joined_sampling_counts_by_what_it_delays_the_learner(joined: VendorReport) -> None:
    found = ReportedTraining.of(joined, TREE, JOINED)
    items = 16
    assert found.joined.learner == BESIDE + WAY + (items - 1) * SLOWEST
    # A search looks at 15 children, a cycle each: the slowest level's interval. The way: two levels, and the root.
    sampled = 31 * 15 + 2 * (25 + 6 + 14 + 8) + 32
    # Weights depend on all that was sampled: 32 are computed, each 2 after the one before, and sent to LOSS. The first
    # one of the second copy is a cycle later.
    weights = sampled + (31 * 2 + 190) + 40 + 1
    after_weights = weights + 90 + (22 + 8 + 30) + (25 + 38 + 12)
    assert found.joined.sampling == after_weights - WAY - STREAM, "weights stream meanwhile"
    pair = found.cell(insertions=4)
    assert pair.joined
    assert pair.replay.sample.value_us == pytest.approx(found.joined.sampling / 300)
    assert pair.learner.step.value_us == pytest.approx(found.joined.learner / 300)
    # `feed` gives an update every 9 cycles at most; no search, twice through the levels, then the change at the root.
    update = 31 * 9 + 2 * 2 * (25 + 6) + 2 * (32 + 12)
    assert pair.replay.insert.value_us < found.replay.update.cycles(2, 32) / 300 == update / 300
    # It begins after the last loss, and BP, GA and WU hide the rest.
    last_loss = weights + (items - 1) * 2 + 90
    assert found.joined.update == max(0, last_loss + update - (found.joined.learner + found.joined.sampling))
    assert {m.source for _, m in pair.measurements()} == {"imported"}


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (("double_dqn", (4, 20, 2)), r"2 kernels are missing \(fp_next1_0, fp_next2_0\)\. .*PEARL_ALGORITHM"),
        (("dqn", (4, 20, 2), 2), r"8 kernels are missing \(bp_q2_1, fp_q1_1, fp_q2_1, fp_target1_1, \.\.\.\)"),
        (("dqn", (4, 2)), r"5 kernels are unexpected \(bp_q2_0, fp_q2_0, fp_target2_0, ga_q2_0, \.\.\.\)"),
        (("td3", (4, 20, 2)), "expected the kernels pearl_learner_... of td3 on 4,20,2 in 1 copies; "),
        (
            ("dqn", (4, 64, 2)),
            r"a loop of 68 trips, over the gradient .*; found trips 20, 20, 22",
        ),
    ],
)
def test_a_report_on_another_learner_says_what_differs(
    alone: VendorReport, build: tuple[Any, ...], expected: str
) -> None:
    algorithm, network, *copies = build
    with pytest.raises(VendorReportError, match=expected):
        ReportedLearner.of(alone, LearnerBuild(algorithm, network, 32, *copies))


def test_what_the_report_does_not_say_is_named(alone: VendorReport, joined: VendorReport, tmp_path: Path) -> None:
    with pytest.raises(VendorReportError, match=r"one loop over items, .* of pearl_learner_fp_q1_0_kernel; found 3"):
        ReportedLearner.of(without_trips(alone, "fp_q1"), ALONE)
    with pytest.raises(VendorReportError, match=r"trip count .* of pearl_learner_submit_kernel\.B\d in"):
        ReportedLearner.of(without_trips(alone, "submit"), ALONE)
    with pytest.raises(VendorReportError, match=r"found trips unknown, unknown, unknown.*or the compiler unrolled"):
        ReportedLearner.of(without_trips(alone, "wu_0_2"), ALONE)
    kernels = (
        dataclasses.replace(k, blocks=k.blocks[:-2]) if "collect" in k.name and k.blocks else k for k in joined.kernels
    )
    with pytest.raises(VendorReportError, match=r"expected three loops in pearl_replay_collect_kernel.*found 2"):
        ReportedTraining.of(dataclasses.replace(joined, kernels=tuple(kernels)), TREE, JOINED)
    copy = Path(shutil.copytree(REPORTS / "learner_2023.prj", tmp_path / "r.prj"))
    (copy / "reports" / "resources" / "json" / "loop_attr.json").unlink()
    with pytest.raises(VendorReportError, match=r"no initiation intervals.*times cannot be determined"):
        ReportedLearner.of(read_vendor_report(copy), ALONE)


def test_each_design_is_imported_as_what_it_is(alone: VendorReport, joined: VendorReport, tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    attempts: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: import_report(alone, BOARD, TREE, store), "import_learner"),
        (lambda: import_report(joined, BOARD, TREE, store), "import_training"),
        (lambda: import_learner(joined, BOARD, JOINED, store), "found a Replay Manager's. .*or with import_training"),
        (lambda: import_training(alone, BOARD, TREE, ALONE, store), "pearl_replay_feed"),
        (
            lambda: import_learner(read_vendor_report(REPORTS / "oneapi_2023.prj"), BOARD, ALONE, store),
            "found a Replay Manager's. Import it with import_report",
        ),
    )
    for attempt, expected in attempts:
        with pytest.raises(VendorReportError, match=expected):
            attempt()
    small = dataclasses.replace(BOARD, dsp=50)
    with pytest.raises(CapacityError, match="takes more than the row board has: 108 DSP blocks of 50"):
        import_learner(alone, small, ALONE, store)
    full = dataclasses.replace(alone, available=dataclasses.replace(alone.available, dsps=10))
    with pytest.raises(CapacityError, match=r"does not fit .* or for fewer copies or a smaller network \(PEARL_COPIES"):
        import_learner(full, BOARD, ALONE, store)
    stranger = dataclasses.replace(alone.kernels[0], name="VectorAdd")
    with pytest.raises(VendorReportError, match=r"expected the Learner's kernels .*; found 'VectorAdd'"):
        import_learner(dataclasses.replace(alone, kernels=(*alone.kernels, stranger)), BOARD, ALONE, store)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ppo", (4, 2), 8), "algorithm is one of dqn, double_dqn, ddpg, td3"),
        (("dqn", (4,), 8), "at least two widths"),
        (("dqn", (4, 0, 2), 8), "whole numbers of at least 1"),
        (("dqn", (4, 2), 8, 9), "A batch of 8 has no items for 9 copies"),
    ],
)
def test_builds_that_no_program_has_are_refused(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        LearnerBuild(*arguments)


# --- into the matrix -------------------------------------------------------------------------------------------------


class RMSpropDQN(TinyDQN):
    """Its optimizer is one that no FPGA's Learner has."""

    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.RMSprop([self._q_flat.parameter])


def test_the_build_of_a_trainer_is_what_the_recipe_would_be_told() -> None:
    box, discrete = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
    torques = spaces.Box(-1.0, 1.0, (2,), np.float32)
    hidden = {"hidden_sizes": (20, 7)}
    assert LearnerBuild.of(DQN(box, discrete, **hidden), 32, 3) == LearnerBuild("double_dqn", (4, 20, 7, 2), 32, 3)
    assert LearnerBuild.of(DQN(box, discrete, **hidden, double=False), 32) == LearnerBuild("dqn", (4, 20, 7, 2), 32)
    assert LearnerBuild.of(DDPG(box, torques, **hidden), 32) == LearnerBuild("ddpg", (4, 20, 7, 2), 32)
    assert LearnerBuild.of(TD3(box, torques, **hidden), 32) == LearnerBuild("td3", (4, 20, 7, 2), 32)
    for other in (DQN(box, discrete, dueling=True), SAC(box, torques), object()):
        assert LearnerBuild.of(other, 32) is None


def test_what_is_imported_is_there_in_the_next_process(
    alone: VendorReport, joined: VendorReport, tmp_path: Path
) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    learner, training = import_learner(alone, BOARD, ALONE, store), import_training(joined, BOARD, TREE, JOINED, store)
    read = [dict(entry.measurements) for entry in CalibrationStore(tmp_path / "c.json")._entries.values()]
    assert len(read) == 2
    found = next(filter(None, (ReportedTraining.from_measurements(TREE, JOINED, each) for each in read)))
    assert found.joined == training.joined
    assert (found.replay.sampling, found.replay.update) == (training.replay.sampling, training.replay.update)
    (again,) = (ReportedLearner.from_measurements(ALONE, each) for each in read if "sample_exposed" not in each)
    assert again is not None
    assert (again.step_cycles, again.frequency_mhz) == (learner.step_cycles, pytest.approx(250))


@pytest.mark.usefixtures("quick_profiles")
def test_imported_steps_stand_in_the_matrix(
    alone: VendorReport, joined: VendorReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"hidden_sizes": (20,), "double": False}
    modelled = composed(tmp_path, capacity=256, settings=settings)
    batch = modelled.placement.batch_size
    build = dataclasses.replace(ALONE, batch_size=batch)
    assert modelled.matrix["board"].learner.step.source == "modelled"
    device = modelled.platform.device("board")
    store = CalibrationStore(tmp_path / "calibration.json")
    learner = import_learner(alone, device, build, store)
    row = composed(tmp_path, capacity=256, settings=settings).matrix["board"]
    assert row.learner == learner.cell()
    assert row.pair == modelled.matrix["board"].pair, "the report is of the Learner alone"
    training = import_training(joined, device, TREE, dataclasses.replace(build, copies=2), store)
    composer = composed(tmp_path, capacity=256, settings=settings, progress=True)
    said = capsys.readouterr().out
    assert f"board: Learner by an imported report, not modelled: DP 1, {learner.step_cycles:,} cycles a step" in said
    assert f"board: both by an imported report, not modelled: DP 2, {training.joined.learner:,} cycles" in said
    row = composer.matrix["board"]
    assert isinstance(row.pair, PairCell)
    assert row.pair.learner.step.value_us == pytest.approx(training.joined.learner / 300)
    assert row.pair.learner.sub_batches == 2
    assert row.pair.replay.sample.value_us == pytest.approx(training.joined.sampling / 300)
    assert row.replay.sample.source == "modelled"
    candidate = next(c for c in composer.placement.candidates if c.pair == ("cpu0", "board"))
    assert candidate.terms.learner_us == pytest.approx(learner.step_cycles / 250)
    for other in ({"capacity": 300}, {"capacity": 256, "fanout": 4}, {"capacity": 256, "mode": "uniform"}):
        row = composed(tmp_path, settings=settings, **other).matrix["board"]
        assert row.learner == learner.cell(), "it does not depend on the tree"
        assert isinstance(row.pair, MissingCell) or row.pair.learner.step.source == "modelled"
    for changes in ({"hidden_sizes": (21,)}, {"double": True}):
        row = composed(tmp_path, capacity=256, settings={**settings, **changes}).matrix["board"]
        assert row.learner.step.source == row.pair.learner.step.source == "modelled"
    for trainer, changes, reason in (
        (TinyDQN, {"implementation": "torch"}, "no torch Learner for FPGAs"),
        (RMSpropDQN, {}, "RMSprop"),
    ):
        row = composed(tmp_path, capacity=256, trainer=trainer, settings={**settings, **changes}).matrix["board"]
        assert isinstance(row.learner, MissingCell), "a report says nothing of what FPGAs cannot run"
        assert reason in row.learner.reason
        assert isinstance(row.pair, MissingCell)


def test_a_tree_that_the_joined_report_is_not_of(joined: VendorReport) -> None:
    with pytest.raises(VendorReportError, match="expected 4 levels below the root"):
        ReportedTraining.of(joined, ReplayTree(256, 4), JOINED)
