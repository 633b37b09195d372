"""What composing does not do where nothing depends on it: measure memory, import models, and take needless samples."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import ONE_CPU, CsvPair, described
from trainers import TinyPPO

from composer.calibration import CalibrationStore
from composer.composer import Composer
from composer.matrix import LearnerCell
from composer.profiling import learner_column
from composer.profiling.learner_column import learner_cell
from composer.profiling.measuring import measure
from composer.profiling.profiler import Profiler
from composer.replay_composing import ReplayComposing
from pearl.actors import waiting
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError

LONG = 1000.0  # seconds, which no measurement here takes

COMPOSING = """
import sys
import composer.composer
import composer.on_policy.composing
from pearl.algorithms import {algorithm}

found = composer.composing.discover
def host_alone(measure=True, progress=None, **options):
    assert not measure, "the memory is measured"
    devices, _ = found(False, progress, **options)
    return devices[:1], []
composer.composing.discover = host_alone
composer.on_policy.composing.RolloutTrials.placed = lambda self, placement: placement

made = composer.composer.Composer(calibration="calibration.json")
made.set_actors(1, env="CartPole-v1", envs_per_actor=2)
made.set_train_function(learner={algorithm}, hidden_sizes=(8, 8))
{replay}
made.run()
made.runtime_gen(path="program.py")
print("connections", len(made.platform.connections))
heavy = ("torch", "pandas", "matplotlib", "tensorboard", "composer.fpga", "composer.modelled_rows")
print("imported", *(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("algorithm", "replay"), [("DQN", "made.set_replay(1000)"), ("PPO", "made.set_rollout(horizon=32, epochs=20)")]
)
def test_composing_on_the_host_alone_imports_and_measures_only_what_it_needs(
    algorithm: str, replay: str, tmp_path: Path
) -> None:
    script = COMPOSING.format(algorithm=algorithm, replay=replay)
    environment = {name: value for name, value in os.environ.items() if name != "PEARL_BUDGET_S"}

    def composed() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = composed()
    assert "its memory is not measured" in first
    assert "connections 0" in first
    assert first.endswith("imported\n"), "nothing heavy is imported"
    assert "profiled: 0 measured" in composed()


class _Discovery:
    """`discover` of a machine with these devices, which notes whether links were measured."""

    def __init__(self, *devices: Device) -> None:
        self.devices, self.measured = list(devices), [False] * 0

    def __call__(self, measure: bool = True, progress: Any = None, **_: Any) -> tuple[list[Device], list[Connection]]:
        self.measured.append(measure)
        host = self.devices[0].name
        return self.devices, [Connection(host, host, 0.1, 10.0)] if measure else []


def test_the_memory_is_measured_for_a_thorough_profile_and_then_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_profiles: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _Discovery(Device("cpu0", "cpu", "cpu", cores=2))
    monkeypatch.setattr("composer.composing.discover", found)
    monkeypatch.delenv("PEARL_BUDGET_S", raising=False)

    def composer() -> Composer:
        made = Composer(calibration=tmp_path / "calibration.json")
        made.set_actors(1, env="CartPole-v1", envs_per_actor=4)
        made.set_train_function(learner=TinyPPO)
        return made

    monkeypatch.setattr("composer.on_policy.composing.RolloutTrials.placed", lambda self, placement: placement)
    composer().run()
    assert found.measured == [False]
    assert [machine.discovered for machine in CalibrationStore(tmp_path / "calibration.json").machines] == [False]
    composer().profile(budget_s=0)
    assert found.measured == [False, False, True]
    composer().run()
    assert found.measured == [False, False, True, False]
    assert "known from an earlier run" in capsys.readouterr().out


def test_the_profiled_actors_interpreter_starts_at_once_and_once(
    csv_pair: Callable[..., CsvPair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_profiles: None
) -> None:
    started: list[int] = []
    monkeypatch.setattr("composer.composer.start_waiting", started.append)
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "calibration.json")
    composer.run(budget_s=0)
    composer.run(budget_s=0)
    assert started == [1], "the second composition measures no Actor"


BEFORE_IMPORTS = """
import sys
import composer.composer
from pearl.algorithms import DQN

class Started(Exception): pass
heavy = {"rich", "jinja2", "composer.composing", "composer.profiling"}
def start_waiting(count): raise Started(sorted(heavy & set(sys.modules)))
composer.composer.start_waiting = start_waiting
made = composer.composer.Composer(calibration="calibration.json", progress=False)
made.set_actors(1, env="CartPole-v1")
made.set_train_function(learner=DQN)
made.set_replay(1000)
try:
    made.run()
except Started as started:
    print(started)
"""


def test_the_profiled_actors_interpreter_starts_before_the_steps_are_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEFORE_IMPORTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_no_interpreter_stays_where_the_checks_fail(csv_pair: Callable[..., CsvPair], tmp_path: Path) -> None:
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "calibration.json")
    with pytest.raises(ConfigurationError):
        composer.run(timesteps=1, budget_s=0)
    assert waiting.take_waiting() is None


# --- the samples ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_worth_it_ends_with_its_warm_up() -> None:
    calls: list[int] = []
    slow = measure(lambda: calls.append(time.sleep(0.002) or 1), LONG, worth_us=1.0)
    assert len(slow) == len(calls) - 1 == 4, "all calls but the first"
    assert min(slow) >= 2000.0
    assert len(measure(lambda: None, LONG, worth_us=1e6)) >= 200


def test_samples_that_take_long_are_few() -> None:
    assert 20 <= len(measure(lambda: time.sleep(0.01), LONG)) < 200
    assert 10 <= len(measure(lambda: time.sleep(0.01), 0.15)) < 20, "quick"
    assert 3 <= len(measure(lambda: time.sleep(0.4), 0.0)) < 20


@pytest.mark.parametrize("thorough", [False, True])
def test_threads_that_cannot_make_up_for_a_slow_step_are_not_measured(
    thorough: bool, csv_pair: Callable[..., CsvPair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composer = described(csv_pair("cpu0,cpu,cpu"), calibration=tmp_path / "calibration.json")
    prepared = ReplayComposing(composer, CalibrationStore(tmp_path / "calibration.json")).prepare(
        Profiler, thorough=thorough
    )
    said: list[str] = []
    prepared.report = said.append
    host = Device("cpu0", "cpu", "cpu", cores=4)
    measured: list[int] = []

    def step(context: object, device: object, name: str, threads: int, parts: int, *, worth_us: float) -> Any:
        measured.append(threads)
        return {"step": [100.0 / threads] * 20}

    monkeypatch.setattr(learner_column, "measure_learner", step)
    monkeypatch.setattr(Profiler, "collection_us", 1e-3)
    cell = learner_cell(prepared, host, "torch", fastest_us=24.0)
    assert isinstance(cell, LearnerCell)
    if thorough:
        assert measured == [1, 2, 4]
        assert prepared.slow == []
    else:
        assert measured == [1, 4], "two threads take 50 us at best, far more than 24 us; four may take 25 us"
        assert [(learner.implementation, learner.threads) for learner in prepared.slow] == [("torch", 2)]
        assert any("the torch Learner on 2 threads is left out (not measured: on cpu0 shared by 2" in s for s in said)
