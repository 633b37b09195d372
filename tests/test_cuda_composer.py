"""Composing and running with the emulator of CUDA's kernels: the matrix, the placements, programs that train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from programs import described, program_of, run, summary
from trainers import OwnTrainer, TinyDDPG, TinyDQN, TinySAC

from composer import Composer
from composer.matrix import MissingCell
from pearl.backends import backend_of
from pearl.backends.cuda.device import EMULATOR, cuda_name
from pearl.devices import Device
from pearl.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("quick_profiles")

ROWS = ["name,kind,backend,selector,cores,active_watts", "cpu0,cpu,cpu,,2,60", "gpu0,gpu,cuda,emulator,,250"]
LINKS = ["source,target,latency_us,bandwidth_gbps", "cpu0,gpu0,10,12"]
PLACEMENTS = [("cpu0", "gpu0"), ("gpu0", "cpu0"), ("gpu0", "gpu0")]
SHORT = ("--timesteps", "2000", "--checkpoint-interval", "1000", "--eval-episodes", "2")


def composed(folder: Path, **problem: Any) -> Composer:
    files = folder / "devices.csv", folder / "connections.csv"
    for path, lines in zip(files, (ROWS, LINKS), strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    composer = described(files, **problem)
    composer.run()
    return composer


def test_every_column_of_its_row_is_measured_with_both_learners(tmp_path: Path) -> None:
    composer = composed(tmp_path)
    for column in ("RM only", "Learner only", "RM & Learner"):
        cell = composer.matrix.cell("gpu0", column)  # type: ignore[arg-type]
        assert not isinstance(cell, MissingCell), column
        assert all(latency.source == "measured" for _, latency in cell.measurements())
    found = {
        (c.replay.device, c.learner.implementation) for c in composer.placement.candidates if c.learner.device == "gpu0"
    }
    assert found == {(replay, name) for replay in ("cpu0", "gpu0") for name in ("cuda", "torch")}


def test_a_trainer_with_an_update_rule_of_its_own_is_left_to_torch(tmp_path: Path) -> None:
    composer = composed(tmp_path, trainer=OwnTrainer)
    found = {c.learner.implementation for c in composer.placement.candidates if c.learner.device == "gpu0"}
    assert found == {"torch"}


@pytest.mark.parametrize(
    ("replay", "learner"),
    [pytest.param(*pair, marks=() if pair == PLACEMENTS[-1] else pytest.mark.slow) for pair in PLACEMENTS],
)
def test_each_placement_trains_and_goes_on_from_its_checkpoint(tmp_path: Path, replay: str, learner: str) -> None:
    composer = composed(tmp_path, settings={"implementation": "cuda"} if learner == "gpu0" else {})
    program, results = program_of(composer, tmp_path, replay, learner), tmp_path / "run"
    text = program.read_text()
    assert ("CudaLearner" in text) == (learner == "gpu0")
    assert bool(re.search(r'make_replay_manager\([^)]*backend="cuda"', text)) == (replay == "gpu0")
    assert ("CudaDataStorage" in text) == (learner == "gpu0")
    code, output = run(program, *SHORT, "--run-dir", str(results))
    assert code == 0, output
    first = summary(results)
    assert first["env_steps"] >= 2000
    assert first["stale_updates"] == 0
    code, output = run(program, *SHORT, "--timesteps", "3000", "--resume", "--run-dir", str(results))
    assert code == 0, output
    assert f"at step {first['env_steps']:,}" in output
    assert summary(results)["gradient_steps"] > first["gradient_steps"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "env"), [(TinyDDPG, "Pendulum-v1"), (TinySAC, "Pendulum-v1"), (TinyDQN, "CartPole-v1")]
)
def test_each_algorithm_trains_there(tmp_path: Path, trainer: type, env: str) -> None:
    composer = composed(tmp_path, trainer=trainer, env=env, settings={"implementation": "cuda"})
    program = program_of(composer, tmp_path, "gpu0", "gpu0")
    code, output = run(program, *SHORT, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output


def test_the_emulator_is_named_by_its_selector() -> None:
    emulator, gpu = Device("gpu0", "gpu", "cuda", "emulator"), Device("gpu0", "gpu", "cuda", "cuda:1")
    backend = backend_of(emulator)
    assert backend.emulated(emulator)
    assert not backend.emulated(gpu)
    assert cuda_name("emulator") == cuda_name(EMULATOR) == EMULATOR
    assert (backend.torch_device(emulator), backend.torch_device(gpu)) == ("cpu", "cuda:1")
    assert emulator.availability().ok
    assert backend.power_meter(emulator) is None
    assert "means nothing" in backend.note(emulator)
    assert backend.note(gpu) == ""
    with pytest.raises(ConfigurationError, match="such as 'cuda:0', or 'emulator'; found 'emulate'"):
        Device("gpu0", "gpu", "cuda", "emulate")
