"""Evaluations in an environment of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from programs import ONE_CPU, described, run, summary, write_csv_pair
from trainers import TinyDQN, TinyPPO, make_short_pole
from typer.testing import CliRunner

from composer import Composer
from composer.html_report.page import report_page
from composer.spec_file import load_spec
from pearl.actors.environment import check_evaluation_env
from pearl.cli import app
from pearl.errors import ConfigurationError, EnvError
from pearl.spec import ActorSpec


@pytest.mark.parametrize(
    ("options", "env", "kwargs"),
    [
        ({}, "A-v0", {"length": 8}),
        ({"eval_env": make_short_pole}, make_short_pole, {}),
        ({"eval_env": "B-v0"}, "B-v0", {}),
        ({"eval_env": "B-v0", "eval_env_kwargs": {"width": 2}}, "B-v0", {"width": 2}),
        ({"eval_env_kwargs": {"length": 9}}, "A-v0", {"length": 9}),
    ],
)
def test_what_evaluations_use(options: dict[str, Any], env: object, kwargs: dict[str, Any]) -> None:
    found = ActorSpec("A-v0", env_kwargs={"length": 8}, timeout_s=7.0, **options).evaluation
    assert (found.env, dict(found.env_kwargs), found.timeout_s) == (env, kwargs, 7.0)
    assert found.evaluation is found


LAMBDA = ("eval_env", lambda: gym.make("CartPole-v1"))


@pytest.mark.parametrize(("name", "value"), [("eval_env", ""), ("eval_env", 3), ("eval_env_kwargs", [1]), LAMBDA])
def test_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must .*found"):
        Composer(progress=False).set_actors(1, env="CartPole-v1", **{name: value})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("Acrobot-v1", r"the observations of eval_env Acrobot-v1 differ"),
        ("MountainCar-v0", "the observations of eval_env MountainCar-v0 differ"),
        ("Nowhere-v0", "Nowhere"),
    ],
)
def test_an_environment_with_other_spaces_is_refused(env: str, message: str) -> None:
    made = gym.make("CartPole-v1")
    with pytest.raises(EnvError, match=message):
        check_evaluation_env(ActorSpec("CartPole-v1", eval_env=env), made.observation_space, made.action_space)


@pytest.mark.parametrize("trainer", [TinyDQN, TinyPPO])
def test_composing_refuses_other_spaces(tmp_path: Path, trainer: type) -> None:
    devices, connections = write_csv_pair(tmp_path, ONE_CPU)
    composer = Composer(progress=False)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.set_actors(1, env="CartPole-v1", eval_env="Acrobot-v1")
    composer.set_train_function(learner=trainer)
    if trainer is TinyDQN:
        composer.set_replay(1000)
    with pytest.raises(EnvError, match="Evaluations need an environment with the spaces of CartPole-v1"):
        composer.run()


@pytest.mark.parametrize(
    ("eval_env", "written", "name"),
    [
        (make_short_pole, "make_short_pole", "trainers.make_short_pole"),
        pytest.param("ShortPole-v0", '"ShortPole-v0"', "ShortPole-v0", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_evaluated_there(tmp_path: Path, quick_profiles: None, eval_env: Any, written: str, name: str) -> None:
    composer = described(write_csv_pair(tmp_path, ONE_CPU))
    composer.set_actors(1, env="CartPole-v1", envs_per_actor=4, eval_env=eval_env, eval_env_kwargs={"limit": 5})
    replay, learner = composer.run()
    program = composer.runtime_gen(replay, learner, tmp_path / "program.py", timesteps=300)
    assert f'    eval_env={written},\n    eval_env_kwargs={{"limit": 5}},\n' in program.read_text()
    code, output = run(program, "--serial", "--eval-episodes", "3", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    found = summary(tmp_path / "run")
    assert found["environment"] == "CartPole-v1"
    assert found["evaluation_environment"] == name
    assert found["last"]["mean"] == found["best"]["selected_mean"] == 5.0
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--no-html"])
    assert "evaluated in" in done.output
    assert f"{name} with limit=5" in done.output
    assert f"{name} with limit=5" in report_page(tmp_path / "run")


def test_a_composition_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(
        '[actors]\nenv = "CartPole-v1"\neval_env = "ShortPole-v0"\neval_env_kwargs = { limit = 5 }\n'
        '[trainer]\nclass = "trainers:TinyDQN"\n[replay]\nsize = 100\n[program]\npath = "p.py"\n'
    )
    composer, _ = load_spec(file, progress=False)
    assert composer.actors is not None
    assert composer.actors.evaluation.env_kwargs == {"limit": 5}
    file.write_text(file.read_text().replace("ShortPole-v0", "trainers:make_short_pole"))
    composer, _ = load_spec(file, progress=False)
    assert composer.actors is not None
    assert composer.actors.evaluation.env is make_short_pole
    file.write_text(file.read_text().replace("limit = 5", "limit = [5]"))
    with pytest.raises(ConfigurationError, match=r"eval_env_kwargs\.limit"):
        load_spec(file, progress=False)
