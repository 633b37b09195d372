from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from programs import Running, is_alive, make_program, run, running
from trainers import OwnTrainer, TinyDDPG

SETTINGS = pytest.mark.parametrize("setting", [1, 2])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> dict[int, Path]:
    """The same problem in both settings."""
    folder = tmp_path_factory.mktemp("programs")
    return {setting: make_program(folder, setting=setting, name=f"setting{setting}") for setting in (1, 2)}


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"))


def summary(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "summary.json").read_text())


def has_episodes(run_dir: Path) -> bool:
    """Training is under way: transitions arrive."""
    episodes = run_dir / "episodes.csv"
    return episodes.exists() and episodes.read_text().count("\n") > 5


# --- a whole run ----------------------------------------------------------------------------------------------------


@SETTINGS
def test_program_runs_and_leaves_its_results(programs: dict[int, Path], tmp_path: Path, setting: int) -> None:
    assert ("setting 1" in programs[setting].read_text()) == (setting == 1)
    code, output = run(
        programs[setting], "--timesteps", "2000", "--eval-episodes", "3", "--run-dir", str(tmp_path / "run")
    )
    assert code == 0, output
    results = tmp_path / "run"
    assert (results / "weights.safetensors").stat().st_size > 0
    assert (results / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((results / "tensorboard").glob("events.*"))
    assert checkpoints(results / "checkpoints")
    found = summary(results)
    assert found["env_steps"] >= 2000
    assert found["gradient_steps"] > 100
    assert found["measured_eps"] > 0
    assert found["evaluation"]["episodes"] == 3
    # 2 samples are trained per transition collected, give or take what may be under way.
    assert found["replay_ratio"] == pytest.approx(2.0, rel=0.25)
    with (results / "progress.csv").open() as file:
        assert {"env_steps", "eps", "gps", "replay_ratio"} <= set(next(csv.reader(file)))
    for named in ("weights.safetensors", "learning_curve.png", "tensorboard", "Evaluation:"):
        assert named in output


def test_help_names_every_option(programs: dict[int, Path]) -> None:
    code, output = run(programs[2], "--help")
    assert code == 0
    for option in ("--timesteps", "--seed", "--checkpoint-dir", "--resume", "--serial", "--bench", "--eval-episodes"):
        assert option in output
    assert "CartPole-v1" in output


def test_bench_writes_measured_beside_predicted(programs: dict[int, Path], tmp_path: Path) -> None:
    code, output = run(programs[1], "--bench", "--bench-seconds", "0.5", "--run-dir", str(tmp_path))
    assert code == 0, output
    rates = json.loads((tmp_path / "bench.json").read_text())
    assert rates["measured_eps"] > 0
    assert f"predicted_eps={rates['predicted_eps']}," in programs[1].read_text()
    assert not (tmp_path / "weights.safetensors").exists()


def test_goal_reached_stops_the_run(programs: dict[int, Path], tmp_path: Path) -> None:
    # Any CartPole policy gets more than a return of 5.
    arguments = ("--timesteps", "50000", "--eval-interval", "300", "--eval-episodes", "5", "--until-return", "5")
    code, output = run(programs[2], "--serial", *arguments, "--run-dir", str(tmp_path))
    assert code == 0, output
    assert summary(tmp_path)["env_steps"] < 5000
    assert "solved" in str(summary(tmp_path)["stopped"])


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param({"trainer": OwnTrainer, "env": "Counting-v0", "training": {"batch_size": 16}}, id="own-trainer"),
        pytest.param({"mode": "uniform"}, id="uniform"),
        pytest.param({"training": {"n_step": 3}}, id="n-step"),
        pytest.param({"trainer": TinyDDPG, "env": "Pendulum-v1"}, id="ddpg"),
    ],
)
def test_kinds_of_problem_train(tmp_path: Path, quick_profiles: None, problem: dict[str, object]) -> None:
    program = make_program(tmp_path, **problem)
    results = tmp_path / "results"
    arguments = ("--timesteps", "1500", "--eval-episodes", "2", "--run-dir", str(results))
    code, output = run(program, "--serial", *arguments)
    assert code == 0, output
    assert summary(results)["gradient_steps"] > 20
    assert (results / "weights.safetensors").stat().st_size > 0


# --- determinism and resuming ---------------------------------------------------------------------------------------


@SETTINGS
def test_serial_runs_repeat_and_resume_to_the_bit(tmp_path: Path, quick_profiles: None, setting: int) -> None:
    # The checkpoint falls on an insertion, when many batches are due; weights are rarely sent to the actors.
    program = make_program(tmp_path, setting=setting, training={"replay_ratio": 16.0, "weight_sync_interval": 900})
    common = ("--serial", "--timesteps", "2000", "--checkpoint-interval", "1024")
    # Evaluations on the way: the best weights so far are part of a run.
    common += ("--eval-interval", "512", "--eval-episodes", "2")

    def started(name: str, *arguments: str) -> contextlib.AbstractContextManager[Running]:
        return running(program, *common, "--run-dir", str(tmp_path / name), *arguments)

    def weights(name: str, program: Running) -> bytes:
        assert program.wait() == 0, program.output
        return (tmp_path / name / "weights.safetensors").read_bytes()

    with started("whole", "--seed", "7") as one, started("again", "--seed", "7") as two:
        whole = weights("whole", one)
        assert weights("again", two) == whole

    # The other half of the run, from the checkpoint that the whole run left behind half way.
    half, end = checkpoints(tmp_path / "whole" / "checkpoints")
    (tmp_path / "half").mkdir()
    shutil.copytree(half, tmp_path / "half" / half.name)
    resume = ("--seed", "7", "--resume", "--checkpoint-dir", str(tmp_path / "half"))
    with started("other", "--seed", "8") as other, started("resumed", *resume) as resumed:
        assert weights("resumed", resumed) == whole
        assert weights("other", other) != whole
    assert checkpoints(tmp_path / "half")[-1].name == end.name
    first, last = summary(tmp_path / "whole"), summary(tmp_path / "resumed")
    for same in ("env_steps", "gradient_steps", "episodes", "replay_ratio", "evaluation"):
        assert last[same] == first[same]


def test_ctrl_c_leaves_a_checkpoint_and_the_run_goes_on(programs: dict[int, Path], tmp_path: Path) -> None:
    arguments = ("--eval-episodes", "0", "--run-dir", str(tmp_path))
    with running(programs[2], "--timesteps", "500000", *arguments) as program:
        program.until(lambda: has_episodes(tmp_path))
        pids = program.actor_pids()
        assert pids
        program.interrupt()
        assert program.wait(30) == 130, program.output
        assert "Traceback" not in program.output
    assert not [pid for pid in pids if is_alive(pid)]
    stopped = summary(tmp_path)
    assert "SIGINT" in str(stopped["stopped"])
    assert checkpoints(tmp_path / "checkpoints")

    code, output = run(programs[2], "--resume", "--timesteps", str(stopped["env_steps"] + 500), *arguments)
    assert code == 0, output
    assert f"at step {stopped['env_steps']:,}" in output
    resumed = summary(tmp_path)
    assert resumed["env_steps"] >= stopped["env_steps"] + 500
    assert resumed["gradient_steps"] > stopped["gradient_steps"]
    assert resumed["episodes"] > stopped["episodes"]


def test_ctrl_c_while_actors_start_is_quiet(programs: dict[int, Path], tmp_path: Path) -> None:
    with running(programs[1], "--timesteps", "500000", "--run-dir", str(tmp_path)) as program:
        pids = program.until(program.actor_pids)
        program.interrupt()
        assert program.wait(30) == 130, program.output
        assert "Traceback" not in program.output
        assert not [pid for pid in pids if is_alive(pid)]


def test_resume_refuses_a_corrupt_checkpoint(programs: dict[int, Path], tmp_path: Path) -> None:
    arguments = ("--serial", "--timesteps", "300", "--eval-episodes", "0", "--run-dir", str(tmp_path))
    assert run(programs[2], *arguments)[0] == 0
    for folder in checkpoints(tmp_path / "checkpoints"):
        largest = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 0xFF
        largest.write_bytes(bytes(data))
    code, output = run(programs[2], "--resume", *arguments)
    assert code == 1
    assert "Error:" in output
    assert "Traceback" not in output
    assert largest.name in output


def test_resume_refuses_the_checkpoint_of_another_program(
    programs: dict[int, Path], tmp_path: Path, quick_profiles: None
) -> None:
    common = ("--serial", "--timesteps", "300", "--eval-episodes", "0")
    assert run(programs[2], *common, "--run-dir", str(tmp_path / "cartpole"))[0] == 0
    other = make_program(tmp_path, env="Counting-v0")
    foreign = ("--checkpoint-dir", str(tmp_path / "cartpole" / "checkpoints"))
    code, output = run(other, "--resume", *common, "--run-dir", str(tmp_path / "counting"), *foreign)
    assert code == 1
    assert "CartPole-v1" in output
    assert "Counting-v0" in output
    assert "Traceback" not in output


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    """Two actors whose environments take their time, so that a run lasts until it is disturbed."""
    folder = tmp_path_factory.mktemp("slow")
    return make_program(folder, setting=1, env="Counting-v0", env_kwargs={"pause_s": 0.001}, actors=2)


def test_a_killed_actor_is_restarted(slow_program: Path, tmp_path: Path) -> None:
    with running(slow_program, "--timesteps", "6000", "--eval-episodes", "0", "--run-dir", str(tmp_path)) as program:
        program.until(lambda: has_episodes(tmp_path))
        os.kill(program.actor_pids()[0], signal.SIGKILL)
        assert program.wait() == 0, program.output
        assert "SIGKILL" in program.output
        assert "restarted" in program.output
    assert summary(tmp_path)["actor_restarts"] == 1
    assert summary(tmp_path)["env_steps"] >= 6000


def test_three_deaths_within_a_minute_stop_the_run(slow_program: Path, tmp_path: Path) -> None:
    killed: set[int] = set()
    with running(slow_program, "--timesteps", "500000", "--run-dir", str(tmp_path)) as program:
        program.until(lambda: has_episodes(tmp_path))
        while len(killed) < 3:
            victim = program.until(lambda: [pid for pid in program.actor_pids() if pid not in killed])[0]
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        assert program.wait(60) == 1, program.output
        assert "Error: Actors died 3 times" in program.output
        assert "SIGKILL" in program.output
        assert "Traceback" not in program.output
        assert not program.actor_pids()
    assert checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize("stage", ["starting", "training"])
def test_actors_do_not_outlive_a_killed_program(slow_program: Path, tmp_path: Path, stage: str) -> None:
    with running(slow_program, "--timesteps", "500000", "--run-dir", str(tmp_path)) as program:
        if stage == "training":
            program.until(lambda: has_episodes(tmp_path))
        pids = program.until(lambda: program.actor_pids() if len(program.actor_pids()) == 2 else [])
        program.process.kill()
        program.process.wait()
        wait_until_gone(pids, 20.0)  # starting actors first import torch


def wait_until_gone(pids: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if is_alive(pid)]} live on"
        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["serial", "parallel"])
def test_an_environment_that_raises_is_shown(tmp_path: Path, quick_profiles: None, mode: str) -> None:
    program = make_program(tmp_path, env="Breaking-v0", env_kwargs={"steps": 1_000_000})
    text = program.read_text()
    assert '"steps": 1000000' in text
    program.write_text(text.replace('"steps": 1000000', '"steps": 200'))  # programs may be edited freely
    arguments = ("--timesteps", "50000", "--run-dir", str(tmp_path / "run"), *(("--serial",) * (mode == "serial")))
    code, output = run(program, *arguments)
    assert code == 1
    assert "Error:" in output
    assert "RuntimeError: the gearbox of this environment fell off" in output
    assert "in _break_down" in output  # the environment's own traceback
    assert checkpoints(tmp_path / "run" / "checkpoints")


def test_unwritable_run_folder_is_refused(programs: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = run(programs[2], "--run-dir", str(tmp_path / "file" / "run"))
    assert code == 1
    assert str(tmp_path / "file" / "run") in output
    assert "--run-dir" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("arguments", [("--timesteps", "-5"), ("--seed", "one"), ("--until-return", "nan")])
def test_wrong_options_are_refused(programs: dict[int, Path], arguments: tuple[str, str]) -> None:
    code, output = run(programs[2], *arguments)
    assert code == 2
    assert arguments[0] in output
    assert repr(arguments[1]) in output
