"""Composing and running with SYCL devices: the matrix, the four placements, what is left to the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from programs import Running, described, program_of, run, running, summary
from trainers import LearnsCartPole, OwnTrainer, TinyDDPG, TinyDQN, TinySAC

import pearl.backends.sycl.storage
from composer import Composer, Placement
from composer.matrix import MissingCell, ReplayCell
from composer.profiling.messages import measure_messages
from pearl.errors import CapacityError, DeviceError, TrainerError
from pearl.spec import TransitionSpec

pytestmark = [pytest.mark.sycl, pytest.mark.usefixtures("quick_profiles")]

HEADER = "name,kind,backend,selector,cores,active_watts,shares_with"
CPU, SYCL = "cpu0,cpu,cpu,,2,60,", "sycl:cpu0,cpu,sycl,opencl:cpu:0,2,60,cpu0"
TO_US, TO_GBPS, FROM_US, FROM_GBPS = 300.0, 8.0, 500.0, 4.0
LINKS = [f"cpu0,sycl:cpu0,{TO_US},{TO_GBPS}", f"sycl:cpu0,cpu0,{FROM_US},{FROM_GBPS}"]
PLACEMENTS = [("cpu0", "cpu0"), ("cpu0", "sycl:cpu0"), ("sycl:cpu0", "cpu0"), ("sycl:cpu0", "sycl:cpu0")]
EACH_PLACEMENT = pytest.mark.parametrize(("replay", "learner"), PLACEMENTS)
BATCH = TinyDQN.batch_size


def machine(folder: Path, *devices: str, links: Sequence[str] = LINKS) -> tuple[Path, Path]:
    """Both CSV files of a machine with the CPU twice, or of `devices`."""
    pair = folder / "devices.csv", folder / "connections.csv"
    rows = devices or (CPU, SYCL)
    for path, lines in zip(pair, ([HEADER, *rows], ["source,target,latency_us,bandwidth_gbps", *links]), strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return pair


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., Composer]:
    """`composed(...)` has run, on the machine above; what it says of the problem goes to `programs.described`."""

    def compose(*, files: tuple[Path, Path] | None = None, replay: dict[str, Any] | None = None, **problem: Any) -> Any:
        composer = described(files or machine(tmp_path), **problem)
        if replay is not None:
            composer.set_replay(2000, **replay)
        composer.run()
        return composer

    return compose


# --- the matrix and the placement -----------------------------------------------------------------------------------


def test_the_cpu_and_sycls_cpu_have_rows_that_are_measured(composed: Callable[..., Composer]) -> None:
    composer = composed()
    assert composer.matrix.devices == ("cpu0", "sycl:cpu0")
    for device in composer.matrix.devices:
        for column in ("RM only", "Learner only", "RM & Learner"):
            cell = composer.matrix.cell(device, column)  # type: ignore[arg-type]
            assert not isinstance(cell, MissingCell), (device, column)
            for name, latency in cell.measurements():
                assert (latency.source, latency.n >= 10) == ("measured", True), (device, column, name)
    (only,) = composer.matrix["sycl:cpu0"].learners
    assert only.learner.implementation == "sycl"  # type: ignore[union-attr]
    found = {(c.replay.device, c.learner.device, c.learner.implementation) for c in composer.placement.candidates}
    on_cpu = {(replay, "cpu0", name) for replay in ("cpu0", "sycl:cpu0") for name in ("native", "torch")}
    assert found == on_cpu | {(replay, "sycl:cpu0", "sycl") for replay in ("cpu0", "sycl:cpu0")}
    assert Placement.from_json(composer.placement.to_json()) == composer.placement


def test_transfers_are_those_of_the_connection_file(composed: Callable[..., Composer]) -> None:
    message = BATCH * 16  # an index, a weight or priority, and a generation each
    terms = {c.pair: c.terms for c in composed().placement.candidates if c.learner.implementation != "torch"}
    there, back = TO_US + message / (TO_GBPS * 1e3), FROM_US + message / (FROM_GBPS * 1e3)
    assert terms["cpu0", "sycl:cpu0"].sample_transfer_us == pytest.approx(there)
    assert terms["cpu0", "sycl:cpu0"].priority_transfer_us == pytest.approx(back)
    assert terms["sycl:cpu0", "cpu0"].sample_transfer_us == pytest.approx(back)
    assert terms["sycl:cpu0", "cpu0"].priority_transfer_us == pytest.approx(there)
    assert terms["sycl:cpu0", "cpu0"].insert_transfer_us == pytest.approx(TO_US + 4 * 16 / (TO_GBPS * 1e3))


def test_messages_are_measured_and_count_between_two_devices(composed: Callable[..., Composer]) -> None:
    for candidate in composed().placement.candidates:
        assert (candidate.terms.messages_us > 0) == (candidate.setting == 1)
    for delay in (0, 1):
        assert min(measure_messages(BATCH, delay)) > 0


@pytest.mark.fpga
def test_the_emulator_is_a_row_without_latencies(composed: Callable[..., Composer], tmp_path: Path) -> None:
    emulator = "fpga_emu0,fpga,sycl,fpga_emu,,,cpu0"
    composer = composed(files=machine(tmp_path, CPU, SYCL, emulator, links=[*LINKS, "cpu0,fpga_emu0,5,10"]))
    assert composer.matrix.devices == ("cpu0", "sycl:cpu0", "fpga_emu0")
    assert "how long they take there means nothing" in composer.matrix.cell("fpga_emu0", "RM only").reason  # type: ignore[union-attr]
    assert all("fpga_emu0" not in candidate.pair for candidate in composer.placement.candidates)


# --- what a SYCL device does not have -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replay", "named"),
    [
        ({"max_times_sampled": 8}, "max_times_sampled=8"),
        ({"mode": "fifo"}, "mode='fifo'"),
        ({"replacement": False, "initial_priority": "mean"}, 'replacement=False, initial_priority="mean"'),
    ],
)
def test_a_replay_that_the_device_lacks_stays_on_the_cpu_with_the_reason(
    composed: Callable[..., Composer], replay: dict[str, Any], named: str
) -> None:
    composer = composed(replay=replay, training={"replay_ratio": 1.0})
    row = composer.matrix["sycl:cpu0"]
    assert row.replay == row.pair == MissingCell(f"the Replay Manager on SYCL devices does not have {named}")
    assert {candidate.replay.device for candidate in composer.placement.candidates} == {"cpu0"}
    assert ("cpu0", "sycl:cpu0") in {candidate.pair for candidate in composer.placement.candidates}


class Pictures(gym.Env[np.ndarray, np.int64]):
    observation_space = spaces.Box(0, 255, (4, 40, 40), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros((4, 40, 40), np.uint8), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros((4, 40, 40), np.uint8), 0.0, False, True, {}


@pytest.fixture
def pictures() -> Iterator[str]:
    gym.register("Pictures-v0", Pictures, disable_env_checker=True)
    yield "Pictures-v0"
    del gym.registry["Pictures-v0"]


@pytest.mark.parametrize(
    "trainer",
    [pytest.param(OwnTrainer, id="own update rule"), pytest.param(TinyDQN, id="images", marks=pytest.mark.slow)],
)
def test_what_the_device_cannot_train_is_told_in_one_line_and_left_to_the_cpu(
    composed: Callable[..., Composer], capsys: pytest.CaptureFixture[str], trainer: type, pictures: str
) -> None:
    env = pictures if trainer is TinyDQN else "CartPole-v1"
    composer = composed(trainer=trainer, env=env, training={"batch_size": 16}, progress=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "the sycl Learner" in line]
    assert len(lines) == 1
    assert "the sycl Learner is left out (unsupported: " in lines[0]
    cell = composer.matrix["sycl:cpu0"].learner
    assert isinstance(cell, MissingCell)
    assert cell.reason == lines[0].strip()
    assert isinstance(composer.matrix["sycl:cpu0"].replay, ReplayCell)
    assert {candidate.learner.device for candidate in composer.placement.candidates} == {"cpu0"}


def test_the_sycl_learner_can_be_forced(composed: Callable[..., Composer], tmp_path: Path) -> None:
    composer = composed(settings={"implementation": "sycl"})
    assert composer.matrix["cpu0"].learner == MissingCell("no sycl Learner for cpu in this version")
    assert composer.placement.learner == "sycl:cpu0"
    text = composer.runtime_gen(path=tmp_path / "forced.py").read_text()
    assert re.search(r'= SyclLearner\(\s+trainer,\s+device="opencl:cpu:0",', text)
    with pytest.raises(TrainerError, match=r"The sycl Learner cannot train OwnTrainer \(unsupported: .* leave impl"):
        composed(trainer=OwnTrainer, settings={"implementation": "sycl"})


def test_a_device_whose_memory_does_not_suffice_takes_less(
    composed: Callable[..., Composer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pearl.backends.sycl.storage.SyclDataStorage

    def full(transition: TransitionSpec, capacity: int, device: str) -> object:
        if capacity >= 2000:
            raise CapacityError("A Data Storage of 2,000 transitions does not fit.")
        return made(transition, capacity, device)

    monkeypatch.setattr("pearl.backends.sycl.storage.SyclDataStorage", full)
    composer = composed(calibration=tmp_path / "calibration.json")
    row = composer.matrix["sycl:cpu0"]
    assert row.pair == MissingCell("A Data Storage of 2,000 transitions does not fit.")
    assert isinstance(row.replay, ReplayCell)
    assert row.storage == row.pair
    pairs = {candidate.pair for candidate in composer.placement.candidates}
    assert pairs == set(PLACEMENTS) - {("sycl:cpu0", "sycl:cpu0")}
    places = {option.device for candidate in composer.placement.candidates for option in candidate.storage}
    assert places == {"cpu0"}, "no program keeps its transitions where they do not fit"
    assert "A Data Storage of 2,000 transitions does not fit." in composer.placement.impossible[0].reason


def test_kernels_that_do_not_compile_leave_the_cpu(
    composed: Callable[..., Composer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise DeviceError("The kernels of learner.sycl.cpp do not compile for X.\nerror: one\nerror: two")

    monkeypatch.setattr("pearl.backends.sycl.learner.SyclLearner._make_kernel", broken)
    composer = composed(calibration=tmp_path / "calibration.json")
    row = composer.matrix["sycl:cpu0"]
    assert row.learner == row.pair == MissingCell("The kernels of learner.sycl.cpp do not compile for X.")
    assert composer.placement.learner == "cpu0"
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "error: one\nerror: two" in record.getMessage()


# --- the four placements --------------------------------------------------------------------------------------------

SHORT = ("--timesteps", "2000", "--checkpoint-interval", "1000", "--eval-episodes", "2")


@pytest.mark.parametrize(
    ("replay", "learner"),
    [pytest.param(*pair, marks=() if pair == PLACEMENTS[-1] else pytest.mark.slow) for pair in PLACEMENTS[1:]],
)
def test_each_placement_trains_and_goes_on_from_its_checkpoint(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str
) -> None:
    composer = composed()
    program, results = program_of(composer, tmp_path, replay, learner), tmp_path / "run"
    assert ("SyclLearner" in program.read_text()) == (learner == "sycl:cpu0")
    assert ('backend="sycl"' in program.read_text()) == (replay == "sycl:cpu0")
    code, output = run(program, *SHORT, "--run-dir", str(results))
    assert code == 0, output
    first = summary(results)
    assert first["env_steps"] >= 2000
    assert first["stale_updates"] == 0
    assert first["replay_ratio"] == pytest.approx(2.0, rel=0.25)
    assert first["gradient_steps"] > 100
    if replay == learner:  # a serial run resumes to the bit below
        return
    code, output = run(program, *SHORT, "--timesteps", "3000", "--resume", "--run-dir", str(results))
    assert code == 0, output
    assert f"at step {first['env_steps']:,}" in output
    assert summary(results)["gradient_steps"] > first["gradient_steps"]


@pytest.mark.parametrize(
    ("replay", "learner"),
    [pytest.param(*pair, marks=() if pair == PLACEMENTS[-1] else pytest.mark.slow) for pair in PLACEMENTS[1:]],
)
@pytest.mark.parametrize("trainer", [TinyDQN, pytest.param(TinySAC, marks=pytest.mark.slow)])
def test_serial_runs_repeat_and_resume_to_the_bit(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str, trainer: type
) -> None:
    composer = composed(trainer=trainer, env="CartPole-v1" if trainer is TinyDQN else "Pendulum-v1")
    program = program_of(composer, tmp_path, replay, learner)
    common = ("--serial", "--timesteps", "1500", "--checkpoint-interval", "512", "--eval-episodes", "0", "--seed", "7")

    def started(name: str, *more: str) -> contextlib.AbstractContextManager[Running]:
        return running(program, *common, "--run-dir", str(tmp_path / name), *more)

    def weights(name: str, process: Running) -> bytes:
        assert process.wait() == 0, process.output
        return (tmp_path / name / "weights.safetensors").read_bytes()

    with started("whole") as one:
        whole = weights("whole", one)
    kept = sorted((tmp_path / "whole" / "checkpoints").glob("checkpoint-*"))
    assert len(kept) == 2
    (tmp_path / "half").mkdir()
    kept[0].rename(tmp_path / "half" / kept[0].name)
    with started("resumed", "--resume", "--checkpoint-dir", str(tmp_path / "half")) as resumed:
        assert weights("resumed", resumed) == whole
    assert summary(tmp_path / "whole")["gradient_steps"] > 20


@pytest.mark.parametrize(
    ("replay", "learner", "options"),
    [
        pytest.param("cpu0", "sycl:cpu0", {"share_next_obs": True}, id="shared", marks=pytest.mark.slow),
        pytest.param("sycl:cpu0", "sycl:cpu0", {"storage": "memmap"}, id="memmap"),
    ],
)
def test_a_storage_that_stays_with_the_host_feeds_a_learner_on_the_device(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str, options: dict[str, Any]
) -> None:
    composer = composed(replay=options)
    program, results = program_of(composer, tmp_path, replay, learner), tmp_path / "run"
    assert "SyclDataStorage" not in program.read_text()
    code, output = run(program, *SHORT, "--run-dir", str(results))
    assert code == 0, output
    assert summary(results)["gradient_steps"] > 100


@pytest.mark.slow
@EACH_PLACEMENT
def test_ddpg_trains_in_each_placement(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str
) -> None:
    composer = composed(trainer=TinyDDPG, env="Pendulum-v1")
    code, output = run(program_of(composer, tmp_path, replay, learner), *SHORT, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert summary(tmp_path / "run")["gradient_steps"] > 100


@pytest.mark.slow
@EACH_PLACEMENT
def test_cartpole_is_learnt_in_each_placement(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str
) -> None:
    composer = composed(trainer=LearnsCartPole, capacity=20_000)
    program, results = program_of(composer, tmp_path, replay, learner), tmp_path / "run"
    arguments = ("--timesteps", "20000", "--eval-interval", "2000", "--until-return", "195", "--eval-episodes", "20")
    code, output = run(program, *arguments, "--run-dir", str(results))
    assert code == 0, output
    assert summary(results)["best"]["mean"] > 120  # chance has 22
    code, output = run(program, "--bench", "--bench-seconds", "1", "--run-dir", str(tmp_path / "bench"))
    assert code == 0, output
    assert json.loads((tmp_path / "bench" / "bench.json").read_text())["measured_eps"] > 0


# --- between composing and running ----------------------------------------------------------------------------------


def ends_with_one_error(program: Path, *words: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, program, "--timesteps", "300", "--run-dir", str(program.parent / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert output.count("Error:") == 1, output
    assert "Traceback" not in output
    for word in words:
        assert word in output


@pytest.mark.parametrize(
    ("replay", "learner"),
    [pytest.param(*pair, marks=() if pair == PLACEMENTS[-1] else pytest.mark.slow) for pair in PLACEMENTS[1:]],
)
def test_a_device_that_is_gone_when_the_program_runs_is_one_error(
    composed: Callable[..., Composer], tmp_path: Path, replay: str, learner: str
) -> None:
    program = program_of(composed(), tmp_path, replay, learner)
    program.write_text(program.read_text().replace("opencl:cpu:0", "level_zero:gpu:3"))
    ends_with_one_error(
        program, "Error: There is no SYCL device 'level_zero:gpu:3' here; there are opencl:cpu:0", "Level Zero"
    )


EXCHANGED = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "2026.0.0" if name == "intel-sycl-rt" else version(name)
"""


def test_a_runtime_that_was_exchanged_is_one_error(composed: Callable[..., Composer], tmp_path: Path) -> None:
    program = program_of(composed(), tmp_path, "sycl:cpu0", "sycl:cpu0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EXCHANGED)
    ends_with_one_error(
        program,
        "Error: SYCL cannot be used: parts of the SYCL runtime do not fit together: intel-sycl-rt 2026.0.0",
        "(needed: 2025.3.*). Fix it:",
        PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]),
    )
