"""Devices whose times are modelled: their rows of the CSV, their cells, placements on machines that are not here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import described
from references import without_biases
from trainers import OwnTrainer, TinyDQN

from benchmarks import fpga_model as comparison
from benchmarks.fpga_papers import papers_row
from composer import Composer
from composer.algorithm1 import place
from composer.codegen.program import check_backends
from composer.fpga.learner_pipeline import actor_critic_pipeline, dqn_pipeline, mlp_layers, pipeline_of
from composer.fpga.learner_program import LearnerProgram, chain
from composer.fpga.model import FpgaPart, ReplayTree, share
from composer.fpga.program_design import replay_resources
from composer.matrix import AssignmentMatrix, LearnerCell, MissingCell, PairCell, ReplayCell
from composer.modelled_rows import ModelledWork, fpga_row, processor_row
from composer.platform import Platform
from pearl.algorithms import DDPG, SAC, TD3
from pearl.algorithms.trainer import make_trainer
from pearl.backends.model.device import CPU_PARAMETERS, GPU_PARAMETERS, FpgaParameters, model_parameters
from pearl.devices import Device
from pearl.errors import ConfigurationError, GenerationError, TrainerError

pytestmark = pytest.mark.usefixtures("quick_profiles")

PLATFORMS = Path(__file__).parent.parent / "examples" / "platforms"
HEADER = "name,kind,backend,selector,cores,clock_mhz,memory_bandwidth_gbps,dsp,sram_kb,luts,active_watts\n"
CPU = "cpu0,cpu,cpu,,2,,,,,,60\n"
BOARD = "board,fpga,model,,,400,76,4510,18202,974400,50\n"
CARTPOLE = LearnerProgram((chain(4, 64, 2),), 2)
WORK = ModelledWork(32, 16, 44, 100_000, (16,), dqn_pipeline(mlp_layers(4, 64, 2)), CARTPOLE)
FPGA = Device("f", "fpga", "model", clock_mhz=400, dsp=4510, sram_kb=18202)
XEON = Device("c", "cpu", "model", cores=64, clock_mhz=2900, memory_bandwidth_gbps=204.8)
RTX = Device("g", "gpu", "model", cores=82, clock_mhz=1700, memory_bandwidth_gbps=936)


def files(folder: Path, *rows: str, links: str = "cpu0,board,5,16\n") -> tuple[Path, Path]:
    devices, connections = folder / "d.csv", folder / "c.csv"
    devices.write_text(HEADER + "".join(rows))
    connections.write_text("source,target,latency_us,bandwidth_gbps\n" + links)
    return devices, connections


def no_measurement(*_: object) -> float:
    raise AssertionError("nothing is measured on a machine that is not here")


# --- rows of the CSV -------------------------------------------------------------------------------------------------


def test_a_selector_replaces_parameters() -> None:
    assert model_parameters("cpu", "") == CPU_PARAMETERS
    found = model_parameters("cpu", " sample_ns = 10 ; operation_us=2.2e1;")
    assert found == dataclasses.replace(CPU_PARAMETERS, sample_ns=10.0, operation_us=22.0)
    assert model_parameters("fpga", "dies=3;arithmetic_cycles=0") == FpgaParameters(dies=3)
    assert model_parameters("gpu", "level_us=0.0") == dataclasses.replace(GPU_PARAMETERS, level_us=0.0)


@pytest.mark.parametrize(
    ("kind", "selector", "expected"),
    [
        ("cpu", "sample_us=1", "expected one of flop_per_cycle, operation_us"),
        ("cpu", "xeon", "found 'xeon'"),
        ("gpu", "level_us=1;level_us=2", "gives level_us twice"),
        ("cpu", "update_ns=0", "number above 0; found '0'"),
        ("cpu", "update_ns=nan", "found 'nan'"),
        ("cpu", "update_ns=__import__('os')", "number above 0"),
        ("fpga", "dies=1.5", "whole number from 1 to 64; found '1.5'"),
        ("fpga", "dies=1000", "whole number from 1 to 64"),
        ("fpga", "arithmetic_cycles=65", "whole number from 0 to 64; found '65'"),
        ("gpu", "level_us=-1", "number of at least 0; found '-1'"),
        ("fpga", "block_kbit=36", "must be 18 or 20"),
        ("fpga", "operation_us=5", "expected one of dies, dsp_per_mac, block_kbit"),
    ],
)
def test_faults_of_a_selector_are_named(kind: str, selector: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected.replace("(", r"\(")):
        Device("d", kind, "model", selector)  # type: ignore[arg-type]


@given(st.text(max_size=30))
def test_any_selector_is_read_or_refused(text: str) -> None:
    for kind in ("cpu", "gpu", "fpga"):
        with contextlib.suppress(ConfigurationError):
            assert model_parameters(kind, text)


# --- cells -----------------------------------------------------------------------------------------------------------


def test_an_fpga_gets_three_modelled_columns_and_says_what_binds() -> None:
    found = fpga_row(FPGA, WORK)
    row = found.row
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.learner, LearnerCell)
    assert isinstance(row.pair, PairCell)
    for cell in (row.replay, row.learner, row.pair):
        assert {m.source for _, m in cell.measurements()} == {"modelled"}
    # 32 requests through the root and 5 levels, which search 16 children at once, at 400 MHz. Updates pass twice.
    assert row.replay.sample.value_us == pytest.approx((31 + 5 * 2 + 1) / 400)
    assert row.replay.insert.value_us == pytest.approx(2 * (15 + 5 + 1) / 400)
    assert "Replay Manager of fanout 16, 5 levels, 1,687 KB" in found.designs
    assert row.learner.implementation == "fpga"
    assert row.pair.replay.sample.value_us < row.replay.sample.value_us, "items stream into the Learner"
    assert row.pair.replay.update.value_us < row.replay.update.value_us, "gradients are added up meanwhile"
    assert any("bound by" in line for line in found.designs)
    printed = papers_row(FPGA, WORK, printed=True).row
    assert isinstance(printed.replay, ReplayCell)
    assert printed.replay.sample.value_us == pytest.approx(2 * 16 * (32 + 5) / 400), "PEARL Eq. 4"


def test_what_does_not_fit_is_a_cell_that_says_so() -> None:
    tiny = dataclasses.replace(FPGA, sram_kb=300)
    row = fpga_row(tiny, WORK).row
    assert isinstance(row.replay, MissingCell)
    assert "At most" in row.replay.reason
    assert isinstance(row.learner, LearnerCell), "alone the Learner fits"
    assert row.pair == row.replay
    needed = replay_resources(ReplayTree(WORK.capacity, 16), FpgaPart.from_device(FPGA)).sram_kb
    between = dataclasses.replace(FPGA, sram_kb=needed + 20)
    row = fpga_row(between, WORK).row
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.pair, MissingCell)
    assert "both do not fit one FPGA" in row.pair.reason
    large = dataclasses.replace(WORK, program=LearnerProgram((chain(100, 4000, 4000, 4),), 4))
    row = fpga_row(FPGA, large).row
    assert isinstance(row.learner, MissingCell)
    assert "too few on-chip memory. A smaller network or batch would fit" in row.learner.reason
    assert isinstance(row.replay, ReplayCell)


def test_columns_that_are_missing_are_named() -> None:
    row = fpga_row(dataclasses.replace(FPGA, dsp=None, clock_mhz=None), WORK).row
    assert isinstance(row.replay, MissingCell)
    assert "fill dsp, clock_mhz of f in the device CSV" in row.replay.reason
    emulator = fpga_row(Device("emu", "fpga", "sycl", "fpga_emu"), WORK).row
    assert isinstance(emulator.learner, MissingCell)
    assert "emulator only shows that kernels work" in emulator.learner.reason
    assert "fill dsp, sram_kb, clock_mhz of the board it stands for" in emulator.learner.reason
    row = processor_row(dataclasses.replace(XEON, cores=None), WORK).row
    assert isinstance(row.learner, MissingCell)
    assert "fill cores of c" in row.learner.reason


def test_the_fanout_is_chosen_where_it_may_be() -> None:
    choice = fpga_row(FPGA, dataclasses.replace(WORK, fanouts=(4, 8, 16, 32, 64))).row
    assert isinstance(choice.replay, ReplayCell)
    assert choice.replay.fanout == 16, "as many children as a search reads at once; fewer make more levels"
    each = [fpga_row(FPGA, dataclasses.replace(WORK, fanouts=(fanout,))).row.replay for fanout in (4, 8, 32, 64)]
    for other in each:
        assert isinstance(other, ReplayCell)
        assert choice.replay.sample.value_us + choice.replay.update.value_us <= (
            other.sample.value_us + other.update.value_us
        )
    printed = papers_row(FPGA, dataclasses.replace(WORK, fanouts=(4, 8, 16, 32, 64)), printed=True).row
    assert isinstance(printed.replay, ReplayCell)
    assert printed.replay.fanout == 4, "each child of a level takes a stage two cycles"


def test_a_tree_that_leaves_the_learner_more_is_taken_where_that_pays() -> None:
    """Beside a Learner that on-chip memory binds, the copy of the leaves is not worth its memory."""
    car = actor_critic_pipeline(mlp_layers(8, 256, 128, 4), mlp_layers(12, 256, 128, 1))
    found = papers_row(FPGA, dataclasses.replace(WORK, pipeline=car))
    alone, _, beside = found.designs
    assert "a copy of the leaves" in alone
    assert "a copy of the leaves" not in beside
    assert isinstance(found.row.pair, PairCell)
    pair = found.row.pair
    taken = pair.replay.sample.value_us + pair.replay.update.value_us + pair.learner.step.value_us
    part = FpgaPart.from_device(FPGA)
    for tree in ReplayTree.choices(WORK.capacity, 16):
        shared = share(tree, car, part, 32)
        cycles = shared.exposed_sampling_cycles + tree.update_cycles(32) + shared.learner.cycles
        assert taken <= part.microseconds(cycles) * (1 + 1e-12)


def test_the_roofline_grows_with_the_work_and_pays_overheads() -> None:
    for device in (XEON, RTX):
        times = []
        for batch in (32, 512, 8192, 131_072):
            row = processor_row(device, dataclasses.replace(WORK, batch_size=batch)).row
            assert isinstance(row.pair, PairCell)
            times.append([m.value_us for _, m in row.pair.measurements()])
        for earlier, later in itertools.pairwise(times):
            assert all(a <= b for a, b in zip(earlier, later, strict=True))
    slow = dataclasses.replace(XEON, selector="operation_us=100")
    row = processor_row(slow, WORK).row
    assert isinstance(row.learner, LearnerCell)
    assert row.learner.step.value_us > 100 * 10, "ten operations: eight units, two updates of weights"
    small, large = (processor_row(d, WORK).row.learner for d in (XEON, RTX))
    assert isinstance(small, LearnerCell)
    assert isinstance(large, LearnerCell)
    assert small.step.value_us < large.step.value_us, "a small network is bound by the GPU's launches"


def test_trainers_are_read_as_the_pipelines_they_are() -> None:
    import gymnasium as gym

    env = gym.make("Pendulum-v1")
    depth = {}
    for trainer_class, critics in ((DDPG, 1), (TD3, 2), (SAC, 2), (without_biases(TD3, (0, 2)), 2)):
        trainer = make_trainer(
            trainer_class, env.observation_space, env.action_space, settings={"hidden_sizes": (8, 8)}
        )
        pipeline = pipeline_of(trainer)
        depth[trainer_class] = pipeline.depth
        networks = [trainer.actor, trainer.critic]
        assert pipeline.gradient_words == sum(p.numel() for net in networks for p in net.parameters())
        assert sum(unit.kind == "LOSS" for unit in pipeline.units) == critics + 1
    assert set(depth.values()) == {4 * 4 - 3}

    class Own:
        pass

    with pytest.raises(TrainerError, match="what a step computes in Own is not known"):
        pipeline_of(Own())


# --- composing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rtx_3090_u200", "server_cg", "server_cgf", "titan_xp_u200"])
def test_a_machine_that_is_not_here_is_composed_for_but_not_programmed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in (
        "replay_column.measure",
        "learner_column.measure",
        "pair_column.measure",
        "messages.measure_messages",
        "context.measure_actor",
    ):
        monkeypatch.setattr(f"composer.profiling.{work}", no_measurement)
    composer = described((PLATFORMS / f"{name}_devices.csv", PLATFORMS / f"{name}_connections.csv"))
    composer.set_opt_metric("power_efficiency")
    replay, learner = composer.run()
    count = len(composer.platform.devices)
    assert len(composer.placement.candidates) == count**2, "every pair"
    assert "measured" not in str(composer.matrix)
    assert "modelled" in str(composer.matrix)
    messages = {candidate.setting: candidate.terms.messages_us for candidate in composer.placement.candidates}
    assert messages[1] == CPU_PARAMETERS.messages_us > 0
    assert messages[2] == 0.0
    if name != "server_cg":
        assert learner.backend == "model"
        assert learner.implementation == "fpga", "a small network and batch"
    with pytest.raises(GenerationError, match=f"{replay.device}, a device that is not here: its times are modelled"):
        composer.runtime_gen(replay, learner, tmp_path / "program.py")
    assert not (tmp_path / "program.py").exists()


def test_what_is_here_is_measured_beside_what_is_not(tmp_path: Path) -> None:
    composer = described(files(tmp_path, CPU, BOARD))
    composer.run()
    sources = composer.matrix.to_pandas().groupby("device")["source"].agg(set)
    assert sources["cpu0"] == {"measured"}
    assert sources["board"] == {"modelled"}
    assert {candidate.pair for candidate in composer.placement.candidates} == {
        (a, b) for a in ("cpu0", "board") for b in ("cpu0", "board")
    }
    here = composer.placement.with_choice(replay_manager="cpu0", learner="cpu0")
    program = composer.runtime_gen(here.replay_config, here.learner_config, tmp_path / "program.py")
    compile(program.read_text(), str(program), "exec")


def test_progress_says_that_a_device_is_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described(files(tmp_path, CPU, BOARD), progress=True).run()
    shown = capsys.readouterr().out
    assert "board is modelled, not measured" in shown
    assert "board: Learner alone: DP " in shown


def test_a_forced_learner_is_not_taken_for_an_fpgas(tmp_path: Path) -> None:
    composer: Composer = described(files(tmp_path, CPU, BOARD))
    composer.set_train_function(learner=TinyDQN, implementation="torch")
    composer.run()
    row = composer.matrix["board"]
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.learner, MissingCell)
    assert "no torch Learner for FPGAs" in row.learner.reason


@pytest.mark.fpga
def test_the_emulator_is_modelled_as_the_board_its_row_states(tmp_path: Path) -> None:
    emulator = "emu,fpga,sycl,fpga_emu,,400,,4510,18202,974400,50\n"
    composer = described(files(tmp_path, CPU, emulator, links="cpu0,emu,5,16\n"))
    composer.run()
    assert isinstance(composer.matrix["emu"].pair, PairCell)
    other = composer.placement.with_choice(replay_manager="emu", learner="emu")
    written = composer.runtime_gen(other.replay_config, other.learner_config, tmp_path / "program.py").read_text()
    assert 'device="fpga_emu"' in written
    board = Device("board", "fpga", "sycl", "opencl:accelerator:0")
    with pytest.raises(GenerationError, match="placed on board, an FPGA board: this version runs programs on the FPGA"):
        check_backends(board, board)


def test_a_learner_whose_update_rule_is_not_known_is_not_modelled(tmp_path: Path) -> None:
    composer = described(files(tmp_path, CPU, BOARD), trainer=OwnTrainer)
    composer.run()
    row = composer.matrix["board"]
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.learner, MissingCell)
    assert (
        "programs for FPGAs cannot train OwnTrainer (unsupported: the update rule of OwnTrainer" in row.learner.reason
    )
    assert {candidate.pair for candidate in composer.placement.candidates} == {("cpu0", "cpu0"), ("board", "cpu0")}


def test_placements_follow_the_work() -> None:
    """What both papers find: small networks and batches on the FPGA, large networks on the GPU."""
    platform = Platform.from_files(PLATFORMS / "server_cgf_devices.csv", PLATFORMS / "server_cgf_connections.csv")

    def learner(widths: tuple[int, ...], batch: int) -> str:
        program = LearnerProgram((chain(*widths),), widths[-1])
        work = ModelledWork(batch, 16, 44, 100_000, (16,), dqn_pipeline(mlp_layers(*widths)), program)
        rows = [(fpga_row if d.kind == "fpga" else processor_row)(d, work).row for d in platform.devices]
        placed = place(AssignmentMatrix(tuple(rows)), platform, batch_size=batch, transition_bytes=44, actor_count=16)
        return platform.device(placed.learner).kind

    assert learner((4, 64, 2), 32) == "fpga"
    assert learner((100, 400, 400, 4), 16_384) == "gpu"


# --- the page of comparisons -----------------------------------------------------------------------------------------


def test_the_page_shows_what_the_model_says_now() -> None:
    text = comparison.TARGET.read_text(encoding="utf-8")
    assert comparison.render(text) == text, "write it anew: python -m benchmarks.fpga_model"


def test_a_page_without_a_tables_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table cf22-table2"):
        comparison.render("# The model\n")
