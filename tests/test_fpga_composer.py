"""Composing and running with an FPGA: a modelled row, nine pairs of devices, programs for each on the emulator."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import Running, described, program_of, run, running, summary
from trainers import LearnsCartPole, OwnTrainer, TinyDDPG, TinyDQN

from composer import Composer, Placement
from composer.matrix import LearnerCell, MissingCell, PairCell, ReplayCell
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.errors import GenerationError, TrainerError

EMULATOR = sycl_availability(EMULATOR_SELECTOR)
pytestmark = [
    pytest.mark.fpga,
    pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}"),
    pytest.mark.usefixtures("quick_profiles"),
]

HEADER = "name,kind,backend,selector,cores,clock_mhz,dsp,sram_kb,luts,active_watts,shares_with"
CPU, SYCL = "cpu0,cpu,cpu,,2,,,,,60,", "sycl:cpu0,cpu,sycl,opencl:cpu:0,2,,,,,60,cpu0"
FPGA = "fpga0,fpga,sycl,fpga_emu,,300,4510,18202,974400,45,"
LINKS = ["cpu0,sycl:cpu0,1,20", "cpu0,fpga0,5,16", "sycl:cpu0,fpga0,5,16"]
DEVICES = ("cpu0", "sycl:cpu0", "fpga0")
WITH_FPGA = [(replay, learner) for replay in DEVICES for learner in DEVICES if "fpga0" in (replay, learner)]


def machine(folder: Path, fpga: str = FPGA, *, sycl: bool = False) -> tuple[Path, Path]:
    """Both CSV files of a machine with a CPU and an FPGA, and with SYCL's CPU device on request."""
    pair = folder / "devices.csv", folder / "connections.csv"
    pair[0].write_text("\n".join([HEADER, CPU, *([SYCL] if sycl else []), fpga]) + "\n")
    links = [link for link in LINKS if sycl or "sycl" not in link]
    pair[1].write_text("\n".join(["source,target,latency_us,bandwidth_gbps", *links]) + "\n")
    return pair


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., Composer]:
    def compose(
        *, fpga: str = FPGA, sycl: bool = False, replay: dict[str, Any] | None = None, **problem: Any
    ) -> Composer:
        composer = described(machine(tmp_path, fpga, sycl=sycl), **{"trainer": TinyDQN, **problem})
        if replay is not None:
            composer.set_replay(2000, **replay)
        composer.run()
        return composer

    return compose


# --- the matrix and the placement -----------------------------------------------------------------------------------


def test_an_fpga_has_a_modelled_row_and_all_nine_pairs_are_placed(composed: Callable[..., Composer]) -> None:
    composer = composed(sycl=True)
    row = composer.matrix["fpga0"]
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.learner, LearnerCell)
    assert isinstance(row.pair, PairCell)
    assert row.learner.implementation == "fpga"
    for cell in (row.replay, row.learner, row.pair):
        assert {m.source for _, m in cell.measurements()} == {"modelled"}
    pairs = {candidate.pair for candidate in composer.placement.candidates}
    assert pairs == {(replay, learner) for replay in DEVICES for learner in DEVICES}
    assert Placement.from_json(composer.placement.to_json()) == composer.placement


def test_what_fpgas_have_no_kernels_for_is_left_out_with_the_reason(composed: Callable[..., Composer]) -> None:
    row = composed(trainer=OwnTrainer).matrix["fpga0"]
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.learner, MissingCell)
    assert "the fpga Learner is left out (unsupported: " in row.learner.reason
    row = composed(replay={"max_times_sampled": 8}, training={"replay_ratio": 1.0}).matrix["fpga0"]
    assert isinstance(row.replay, MissingCell)
    assert "The Replay Manager on FPGAs does not have max_times_sampled=8" in row.replay.reason
    assert isinstance(row.learner, LearnerCell)


def test_the_fpga_learner_can_be_forced(composed: Callable[..., Composer], tmp_path: Path) -> None:
    composer = composed(settings={"implementation": "fpga"})
    assert composer.matrix["cpu0"].learner == MissingCell("no fpga Learner for cpu in this version")
    text = composer.runtime_gen(path=tmp_path / "forced.py").read_text()
    assert re.search(r'= FpgaLearner\(\s+trainer,\s+device="fpga_emu",\s+sub_batches=\d+,', text)
    with pytest.raises(TrainerError, match="The fpga Learner cannot train OwnTrainer"):
        composed(trainer=OwnTrainer, settings={"implementation": "fpga"})


def test_a_board_that_is_not_here_gets_no_program(composed: Callable[..., Composer], tmp_path: Path) -> None:
    composer = composed(fpga=FPGA.replace(",sycl,fpga_emu,", ",model,,"))
    with pytest.raises(GenerationError, match="placed on fpga0, a device that is not here"):
        program_of(composer, tmp_path, "fpga0", "cpu0")


# --- programs -------------------------------------------------------------------------------------------------------

SHORT = ("--timesteps", "1000", "--checkpoint-interval", "600", "--eval-episodes", "2")


@pytest.mark.parametrize(
    ("replay", "learner"),
    [pytest.param(*pair, marks=() if pair == ("fpga0", "fpga0") else pytest.mark.slow) for pair in WITH_FPGA],
)
def test_each_pair_with_the_fpga_trains_and_goes_on_from_its_checkpoint(
    composed: Callable[..., Composer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: str, learner: str
) -> None:
    monkeypatch.delenv("PEARL_FPGA_OPTIMIZE")  # as users run it
    composer = composed(sycl="sycl:cpu0" in (replay, learner), training={"replay_ratio": 0.5})
    program, results = program_of(composer, tmp_path, replay, learner), tmp_path / "run"
    text = program.read_text()
    assert ("FpgaLearner" in text) == (learner == "fpga0")
    assert ('backend="fpga"' in text) == (replay == "fpga0")
    assert "fpga0 is the FPGA emulator: the prediction is for the board that its row states." in text
    code, output = run(program, *SHORT, "--run-dir", str(results))
    assert code == 0, output
    first = summary(results)
    assert first["env_steps"] >= 1000
    assert first["stale_updates"] == 0
    assert first["gradient_steps"] > 10
    if replay == learner:  # a serial run resumes to the bit below
        return
    code, output = run(program, *SHORT, "--timesteps", "2200", "--resume", "--run-dir", str(results))
    assert code == 0, output
    assert f"at step {first['env_steps']:,}" in output
    assert summary(results)["gradient_steps"] > first["gradient_steps"]


@pytest.mark.parametrize(
    "trainer", [pytest.param(TinyDQN, id="dqn"), pytest.param(TinyDDPG, id="ddpg", marks=pytest.mark.slow)]
)
def test_serial_runs_on_the_fpga_repeat_and_resume_to_the_bit(
    composed: Callable[..., Composer], tmp_path: Path, trainer: type
) -> None:
    env = "CartPole-v1" if trainer is TinyDQN else "Pendulum-v1"
    composer = composed(trainer=trainer, env=env, training={"replay_ratio": 0.5})
    program = program_of(composer, tmp_path, "fpga0", "fpga0")
    common = ("--serial", "--timesteps", "1000", "--checkpoint-interval", "512", "--eval-episodes", "0", "--seed", "7")

    def started(name: str, *more: str) -> contextlib.AbstractContextManager[Running]:
        return running(program, *common, "--run-dir", str(tmp_path / name), *more)

    def weights(name: str, process: Running) -> bytes:
        assert process.wait() == 0, process.output
        return (tmp_path / name / "weights.safetensors").read_bytes()

    with started("whole") as one:
        whole = weights("whole", one)
    kept = sorted((tmp_path / "whole" / "checkpoints").glob("checkpoint-*"))
    (tmp_path / "half").mkdir()
    kept[0].rename(tmp_path / "half" / kept[0].name)
    with started("resumed", "--resume", "--checkpoint-dir", str(tmp_path / "half")) as resumed:
        assert weights("resumed", resumed) == whole
    assert summary(tmp_path / "whole")["gradient_steps"] > 20


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "learner"), WITH_FPGA)
def test_cartpole_is_learnt_by_each_pair_with_the_fpga(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str
) -> None:
    composer = composed(trainer=LearnsCartPole, capacity=20_000, sycl="sycl:cpu0" in (replay, learner))
    program, results = program_of(composer, tmp_path, replay, learner), tmp_path / "run"
    arguments = ("--timesteps", "20000", "--eval-interval", "2000", "--until-return", "195", "--eval-episodes", "20")
    code, output = run(program, *arguments, "--run-dir", str(results))
    assert code == 0, output
    assert summary(results)["best"]["mean"] > 120  # chance has 22


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "learner"), WITH_FPGA)
def test_ddpg_trains_in_each_pair_with_the_fpga(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str
) -> None:
    composer = composed(trainer=TinyDDPG, env="Pendulum-v1", sycl="sycl:cpu0" in (replay, learner))
    code, output = run(program_of(composer, tmp_path, replay, learner), *SHORT, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert summary(tmp_path / "run")["gradient_steps"] > 50
