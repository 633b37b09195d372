"""The examples with another environment: only the line that names it is changed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from programs import run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.usefixtures("quick_profiles")


def compose(name: str, env: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Compose the example for `env` in `folder`; the program that it would run, and its text."""
    copy = f"{name}_{re.sub('[^A-Za-z]', '', env).lower()}"
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    changed, count = re.subn(r'^ENV = ".*"$', f'ENV = "{env}"', text, flags=re.MULTILINE)
    assert count == 1
    (folder / f"{copy}.py").write_text(changed, encoding="utf-8")
    programs: list[Path] = []

    def note(program: Path, options: Sequence[str]) -> int:
        programs.append(folder / program)
        return 0

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", [copy])
    module = importlib.import_module(copy)
    monkeypatch.setattr(module, "run_generated", note)
    assert module.main() == 0
    (program,) = programs
    return program, program.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "env", "goal"),
    [
        ("dqn_cartpole", "CartPole-v1", 490.0),
        ("dqn_cartpole", "LunarLander-v3", 200),
        ("sac_pendulum", "MountainCarContinuous-v0", 90.0),
        ("td3_pendulum", "LunarLanderContinuous-v3", 200),
        ("ddpg_pendulum", "MountainCarContinuous-v0", 90.0),
        ("ddpg_mountain_car", "Pendulum-v1", None),
    ],
)
def test_an_example_stops_where_its_environment_is_solved(
    name: str, env: str, goal: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, text = compose(name, env, tmp_path, monkeypatch)
    assert f'env="{env}"' in text
    found = re.search("until_return=(.*),", text)
    assert found is not None
    assert found[1] == str(goal if goal is None else float(goal))
    assert env in str(program)


def test_an_example_with_another_environment_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, text = compose("dqn_cartpole", "Acrobot-v1", tmp_path, monkeypatch)
    assert "until_return=-100.0," in text
    assert "Run it:    python runs/dqn-Acrobot-v1/program.py" in capsys.readouterr().out
    code, output = run(program, "--timesteps", "1500", "--eval-episodes", "1", "--eval-interval", "1000")
    assert code == 0, output
    assert "Stopping: all steps done" in output
