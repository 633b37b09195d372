"""Schedules of learning rates, exploration and clip range: one vocabulary, followed, logged, and safe to load."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from programs import described, make_program, run, write_csv_pair
from trainers import TinyDQN, TinyPPO, TinyTD3

import composer.composing
from composer.codegen.trainer_source import schedule_import
from composer.spec_file import load_spec
from pearl import load_policy
from pearl.algorithms import DQN, PPO
from pearl.algorithms.trainer import is_as_built_in
from pearl.errors import ConfigurationError, GenerationError, PolicyError, TrainerError
from pearl.exploration import EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeck, make_explorer
from pearl.policy.description import PolicyDescription
from pearl.schedules import factor_at, names_code, plain_schedule

DOCS = Path(__file__).resolve().parent.parent / "docs" / "schedules.md"
OBS, ACTIONS = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)
shares = st.floats(0.0, 1.0)
factors = st.floats(0.0, 10.0)


def halved(progress: float) -> float:
    return 0.5


def rising(progress: float) -> float:
    return 3.0 * progress


def failing(progress: float) -> float:
    return 1.0 / progress


def not_a_number(progress: float) -> float:
    return math.nan


NOT_CALLABLE = 3


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of docs/schedules.md, in a folder of its own."""
    folder = tmp_path / "of_the_user"
    folder.mkdir()
    block = DOCS.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (folder / "my_schedules.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("my_schedules")
    sys.modules.pop("my_schedules", None)


# --- factors ----------------------------------------------------------------------------------------------------------


def test_named_schedules_go_from_one_to_their_end() -> None:
    assert [factor_at("constant", p) for p in (0.0, 0.3, 2.0)] == [1.0, 1.0, 1.0]
    assert [factor_at("linear", p) for p in (-1.0, 0.25, 1.0, 7.0)] == [1.0, 0.75, 0.0, 0.0]
    assert [factor_at("cosine", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert [factor_at(("linear", 0.2), p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.6, 0.2])
    assert [factor_at(("cosine", 0.1), p) for p in (0.0, 1 / 3, 1.0)] == pytest.approx([1.0, 0.775, 0.1])


@given(pairs=st.lists(st.tuples(shares, factors), min_size=1, max_size=6, unique_by=lambda p: p[0]), progress=shares)
def test_pairs_are_joined_by_straight_lines(pairs: list[tuple[float, float]], progress: float) -> None:
    pairs.sort()
    expected = np.interp(progress, *zip(*pairs, strict=True))
    assert factor_at(plain_schedule(pairs), progress) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)


def test_two_pairs_of_a_share_jump() -> None:
    steps = ((0.0, 1.0), (0.5, 1.0), (0.5, 0.1))
    assert [factor_at(steps, p) for p in (0.0, 0.49, 0.5, 1.0)] == [1.0, 1.0, 0.1, 0.1]


def test_a_function_is_followed_by_its_name() -> None:
    name = plain_schedule(rising)
    assert name == f"{__name__}:rising"
    assert names_code(name)
    assert [factor_at(schedule, 0.5) for schedule in (name, rising)] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ("cosin", ""),
        ("import os", ""),
        ("os.system('true')", ""),
        (None, ""),
        (0.5, ""),
        (("linear", -0.1), ""),
        (("linear", math.nan), ""),
        (("constant", 0.1), ""),
        ((), ""),
        (((0.0, 1.0), (0.5,)), ""),
        (((0.0, True),), "Shares are from 0 to 1, factors at least 0."),
        (((0.0, 1.0), (0.5, -1.0)), "Shares are from 0 to 1, factors at least 0."),
        (((0.5, 1.0), (0.2, 0.1)), "none below the one before."),
        (((0.0, 1.0), (1000, 0.1)), "Shares are of the run: from 0 to 1"),
        (lambda progress: 1.0, "write it with `def` at the top level of a .py file."),
    ],
    ids=lambda value: "lambda" if callable(value) else repr(value),
)
def test_what_is_no_schedule_is_named(schedule: object, advice: str) -> None:
    with pytest.raises(TrainerError, match=r"PPO\.clip_range_schedule must be .*; found ") as caught:
        PPO(OBS, ACTIONS, clip_range_schedule=schedule)
    assert advice in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"EpsilonGreedy\.schedule must be .*; found "):
        EpsilonGreedy(schedule=schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (failing, r"failing must return a number of at least 0; at progress 0 it failed: ZeroDivisionError"),
        (not_a_number, r"not_a_number must return a number of at least 0; at progress 0 it returned nan"),
        (f"{__name__}:NOT_CALLABLE", "must be a function of progress; found 3"),
        ("no_such_module:rate", "cannot be imported: ModuleNotFoundError.*next to the program or the script"),
        (f"{__name__}:no_such_rate", "cannot be imported: AttributeError"),
    ],
    ids=["failing", "nan", "number", "no module", "no function"],
)
def test_a_function_that_fails_is_refused_before_the_run(schedule: Any, reason: str) -> None:
    with pytest.raises(TrainerError, match=rf"DQN\.learning_rate_schedule: .*{reason}"):
        DQN(OBS, ACTIONS, learning_rate_schedule=schedule)
    with pytest.raises(ConfigurationError, match=reason):
        make_explorer(EpsilonGreedy(schedule=schedule), ACTIONS, 1, np.random.default_rng(0))


# --- followed ---------------------------------------------------------------------------------------------------------


class ByFunction(TinyDQN):
    learning_rate_schedule = halved  # type: ignore[assignment]


class ByName(TinyDQN):
    learning_rate_schedule = f"{__name__}:halved"


@pytest.mark.parametrize("trainer_class", [ByFunction, ByName])
def test_a_class_names_its_function(trainer_class: type[DQN]) -> None:
    trainer = trainer_class(OBS, ACTIONS)
    trainer.set_progress(0.3)
    assert trainer.scheduled_values(0)["learning_rate"] == 0.5 * DQN.learning_rate
    assert is_as_built_in(trainer_class) == (trainer_class is ByName)  # a function is code


def test_the_clip_range_follows_any_schedule() -> None:
    trainer = PPO(OBS, ACTIONS, clip_range=0.4, clip_range_schedule=[[0.0, 1.0], [0.5, 0.5]])
    for progress, expected in ((0.0, 0.4), (0.25, 0.3), (0.75, 0.2)):
        trainer.set_progress(progress)
        assert trainer.scheduled_values(0)["clip_range"] == pytest.approx(expected)
        assert trainer._rule_scalars()["clip_range"] == pytest.approx(expected)  # of the native Learner


def test_epsilon_follows_any_schedule_between_its_ends() -> None:
    cosine = EpsilonGreedy(0.9, 0.1, 100, "cosine")
    assert [cosine.epsilon(steps) for steps in (0, 50, 100, 500)] == pytest.approx([0.9, 0.5, 0.1, 0.1])
    stepwise = EpsilonGreedy(1.0, 0.0, 1000, ((0.0, 1.0), (0.5, 1.0), (0.5, 0.2)))
    assert [stepwise.epsilon(steps) for steps in (0, 499, 500, 2000)] == [
        1.0,
        1.0,
        pytest.approx(0.2),
        pytest.approx(0.2),
    ]
    assert EpsilonGreedy(0.5, 0.1, 100, "constant").epsilon(50) == 0.5
    assert EpsilonGreedy(1.0, 0.1, 100, rising).epsilon(90) == 1.0  # a probability, whatever the function returns
    trainer = TinyDQN(OBS, ACTIONS, exploration=cosine)
    assert trainer.scheduled_values(50)["epsilon"] == pytest.approx(0.5)


BOX = spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))
HALVES = np.array([2.0, 0.5])


@pytest.mark.parametrize("noise", [GaussianNoise, OrnsteinUhlenbeck])
def test_noise_follows_any_schedule_and_is_logged(noise: type[GaussianNoise] | type[OrnsteinUhlenbeck]) -> None:
    falling = noise(0.2, schedule="linear", steps=1000)
    assert [falling.sigma_at(steps) for steps in (0, 500, 1000, 10**9)] == pytest.approx([0.2, 0.1, 0.0, 0.0])
    stepwise = noise(0.2, schedule=[[0, 1], [0.5, 1], [0.5, 0.25]], steps=1000)  # type: ignore[arg-type]
    assert [stepwise.sigma_at(steps) for steps in (499, 500)] == pytest.approx([0.2, 0.05])
    assert noise(0.3, schedule=rising, steps=100).sigma_at(90) == pytest.approx(0.3 * rising(0.9))
    trainer = TinyTD3(OBS, BOX, exploration=falling)
    assert trainer.scheduled_values(250)["noise_sigma"] == pytest.approx(0.15)
    assert "noise_sigma" not in TinyTD3(OBS, BOX, exploration=noise(0.2)).scheduled_values(250)


def test_the_noise_of_actions_shrinks_with_its_schedule() -> None:
    setting = GaussianNoise(0.1, 0, ("linear", 0.5), 1000)
    explorer = make_explorer(setting, BOX, 20_000, np.random.default_rng(0))
    middle = np.tile((BOX.low + BOX.high) / 2, (20_000, 1))
    for steps, sigma in ((0, 0.1), (500, 0.075), (1000, 0.05), (10**12, 0.05)):
        found = (explorer.apply(middle, steps) - middle).std(axis=0)
        np.testing.assert_allclose(found, sigma * HALVES, rtol=0.03)


def test_correlated_noise_follows_its_schedule_in_each_environment() -> None:
    """By the recursion of `OrnsteinUhlenbeck`, with the sigma of each step; an episode's end resets its environment."""
    setting = OrnsteinUhlenbeck(0.2, 0.3, 0.5, 0, "linear", 40)
    explorer = make_explorer(setting, BOX, 3, np.random.default_rng(7))
    rng, state = np.random.default_rng(7), np.zeros((3, 2))
    middle = np.tile((BOX.low + BOX.high) / 2, (3, 1))
    for t in range(60):
        sigma = 0.2 * max(0.0, 1.0 - t / 40)
        state = state - 0.3 * 0.5 * state + sigma * 0.5**0.5 * rng.normal(size=(3, 2))
        np.testing.assert_allclose(explorer.apply(middle, t), middle + HALVES * state, rtol=1e-5, atol=1e-6)
        if t == 20:
            explorer.end_episodes(np.array([False, True, False]))
            state[1] = 0.0
    assert np.abs(state).max() > 0.0, "it decays after the schedule's end"


@pytest.mark.parametrize("noise", [GaussianNoise, OrnsteinUhlenbeck])
@pytest.mark.parametrize(
    "wrong",
    [{"schedule": "linear"}, {"steps": 100}, {"schedule": "cosine", "steps": 0}, {"schedule": "linear", "steps": 2.5}],
)
def test_a_noise_needs_the_steps_of_its_schedule(noise: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="steps must be the environment steps, at least 1, in which sigma"):
        noise(**wrong)
    with pytest.raises(ConfigurationError, match=rf"{noise.__name__}\.schedule must be .*; found 'falling'"):
        noise(schedule="falling", steps=10)


@pytest.mark.slow
def test_a_program_logs_the_noise_of_a_function(tmp_path: Path, quick_profiles: None, user_module: ModuleType) -> None:
    settings = {"exploration": GaussianNoise(0.2, 50, user_module.warm_up, 1000)}
    (tmp_path / "made").mkdir()
    program = make_program(tmp_path / "made", trainer=TinyTD3, env="Pendulum-v1", settings=settings)
    assert 'schedule="my_schedules:warm_up", steps=1000)' in program.read_text(encoding="utf-8")
    results = tmp_path / "results"
    code, output = run(program, "--serial", "--timesteps", "600", "--eval-episodes", "1", "--run-dir", str(results))
    assert code == 0, output
    with (results / "progress.csv").open(newline="", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    expected = 0.2 * user_module.warm_up(int(last["env_steps"]) / 1000)
    assert float(last["noise_sigma"]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("setting", [1, 2])
def test_a_program_follows_a_function_of_a_module_elsewhere(
    tmp_path: Path, quick_profiles: None, user_module: ModuleType, setting: int
) -> None:
    settings = {
        "learning_rate_schedule": user_module.warm_up,
        "exploration": EpsilonGreedy(1.0, 0.2, 1000, user_module.warm_up),
    }
    (tmp_path / "made").mkdir()
    program = make_program(tmp_path / "made", setting=setting, settings=settings)
    text = program.read_text(encoding="utf-8")
    assert '"learning_rate_schedule": "my_schedules:warm_up"' in text
    assert 'schedule="my_schedules:warm_up")' in text
    results = tmp_path / "results"
    code, output = run(program, "--serial", "--timesteps", "2000", "--eval-episodes", "1", "--run-dir", str(results))
    assert code == 0, output
    with (results / "progress.csv").open(newline="", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    expected = user_module.warm_up(int(last["env_steps"]) / 2000) * DQN.learning_rate
    assert float(last["learning_rate"]) == pytest.approx(expected, abs=0.02 * DQN.learning_rate)
    assert float(last["epsilon"]) == pytest.approx(0.2)
    # The policy is usable without the module, and its file names no code.
    Path(str(user_module.__file__)).unlink()
    sys.modules.pop("my_schedules")
    assert "my_schedules" not in (results / "policy.json").read_text(encoding="utf-8")
    policy = load_policy(results)
    assert policy.predict(np.zeros(4, np.float32), deterministic=False) in (0, 1)


def test_a_program_of_rollouts_logs_what_its_schedules_make(tmp_path: Path, quick_profiles: None) -> None:
    composer = described(write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,2,60",)))
    settings: dict[str, Any] = {"learning_rate_schedule": ("linear", 0.5), "clip_range_schedule": "cosine"}
    composer.replay = None
    composer.set_train_function(learner=TinyPPO, **settings)
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=1024)
    results = tmp_path / "results"
    code, output = run(program, "--serial", "--eval-episodes", "1", "--run-dir", str(results))
    assert code == 0, output
    with (results / "progress.csv").open(newline="", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    assert 0.5 <= float(last["learning_rate"]) / TinyPPO.learning_rate < 0.7
    assert 0.0 <= float(last["clip_range"]) < 0.05


# --- composing --------------------------------------------------------------------------------------------------------


def test_a_script_that_composes_must_guard_its_composing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "my_script.py")
    source = "def rate(progress):\n    return 1.0\n"
    exec(compile(source, main.__file__, "exec"), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    name = plain_schedule(main.rate)  # type: ignore[attr-defined]
    assert name == "my_script:rate"
    Path(main.__file__).write_text(source, encoding="utf-8")
    with pytest.raises(GenerationError, match="composes when it is imported"):
        schedule_import(str(name))
    Path(main.__file__).write_text(f'{source}\nif __name__ == "__main__":\n    pass\n', encoding="utf-8")
    assert schedule_import(str(name)).folder == tmp_path


def test_composition_files_take_every_schedule_but_functions(tmp_path: Path, user_module: ModuleType) -> None:
    toml = """
[actors]
env = "CartPole-v1"
[trainer]
class = "pearl.algorithms:{algorithm}"
{settings}
"""
    file = tmp_path / "made.toml"

    def settings_of(algorithm: str, *settings: str) -> dict[str, Any]:
        replay = "[replay]\nsize = 1000\n" if algorithm != "PPO" else ""
        file.write_text(toml.format(algorithm=algorithm, settings="\n".join(settings)) + replay, encoding="utf-8")
        return load_spec(file, progress=False)[0].settings

    clip = "clip_range_schedule = [[0, 1], [0.5, 0.1]]"
    assert settings_of("PPO", 'learning_rate_schedule = ["cosine", 0.1]', clip) == {
        "learning_rate_schedule": ("cosine", 0.1),
        "clip_range_schedule": ((0.0, 1.0), (0.5, 0.1)),
    }
    exploring = 'exploration = { kind = "EpsilonGreedy", steps = 50, schedule = ["linear", 0.5] }'
    found = settings_of("DQN", 'learning_rate_schedule = "my_schedules:warm_up"', exploring)
    assert found["learning_rate_schedule"] == "my_schedules:warm_up"
    assert found["exploration"] == EpsilonGreedy(steps=50, schedule=("linear", 0.5))
    noise = 'exploration = { kind = "GaussianNoise", schedule = ["linear", 0.1], steps = 900 }'
    assert settings_of("TD3", noise)["exploration"] == GaussianNoise(schedule=("linear", 0.1), steps=900)
    for wrong, expected in (
        ('"falling"', r"\[trainer\] learning_rate_schedule: .* must be .*; found 'falling'"),
        ("0.5", r"\[trainer\] learning_rate_schedule: .*; found 0\.5"),
        ('"my_schedules:cold"', r"\[trainer\] learning_rate_schedule: my_schedules has no"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            settings_of("PPO", f"learning_rate_schedule = {wrong}")


class Reached(Exception):
    pass


def test_the_snippet_composes(user_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*arguments: object, **options: object) -> None:
        raise Reached

    monkeypatch.setattr(composer.composing, "discover", reached)
    block = DOCS.read_text(encoding="utf-8").split("```python\n")[2].split("```")[0]
    with pytest.raises(Reached):
        exec(compile(block, "compose_schedules.py", "exec"), {"__name__": "snippet"})


# --- policies ---------------------------------------------------------------------------------------------------------


def test_a_policys_file_makes_nobody_import_anything(tmp_path: Path) -> None:
    trainer = TinyDQN(OBS, ACTIONS, exploration=EpsilonGreedy(1.0, 0.0, 10, halved), learning_rate_schedule=halved)
    described_policy = PolicyDescription.of(
        trainer, {}, environment="", env_kwargs={}, observation_space=OBS, action_space=ACTIONS
    )
    content = json.loads(described_policy.to_json())
    assert "learning_rate_schedule" not in content["settings"]
    assert content["settings"]["exploration"]["start"] == content["settings"]["exploration"]["end"] == 0.5
    noise = TinyTD3(OBS, BOX, exploration=GaussianNoise(0.4, None, halved, 10))
    described_noise = PolicyDescription.of(
        noise, {}, environment="", env_kwargs={}, observation_space=OBS, action_space=BOX
    )
    kept = json.loads(described_noise.to_json())["settings"]["exploration"]
    assert (kept["sigma"], kept["schedule"], kept["steps"]) == (pytest.approx(0.2), "constant", None)
    content["settings"]["exploration"]["schedule"] = "antigravity:open"
    with pytest.raises(PolicyError, match="its schedule names code, 'antigravity:open'"):
        PolicyDescription.from_json(json.dumps(content), "policy.json")
