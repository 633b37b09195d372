"""Saved policies are evaluated and shown, in the environment of their run or another one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from policies import WideDQN, command, run_folder, watch_policy_without_a_screen

import pearl
from pearl.algorithms import DQN
from pearl.errors import ConfigurationError, EnvError, MissingExtraError, PolicyError
from pearl.policy import SavedPolicy, evaluate_policy, export_policy, watch_policy

gym.register("ShortCartPole-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)


def double_pole(render_mode: str | None = None) -> gym.Env[Any, Any]:
    space = gym.spaces.Box(-1e9, 1e9, (4,), np.float64)
    return gym.wrappers.TransformObservation(CartPoleEnv(render_mode=render_mode), np.float64, space)


gym.register("DoublePole-v0", double_pole)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    env = gym.make("CartPole-v1")
    case = (WideDQN, env.observation_space, env.action_space)
    return run_folder(tmp_path / "run", case, env="CartPole-v1")


@pytest.fixture
def policy(run: Path) -> SavedPolicy:
    return pearl.load_policy(run)


def test_an_evaluation_is_what_predict_scores(policy: SavedPolicy) -> None:
    found = evaluate_policy(policy, episodes=1, seed=3)
    env, totals = gym.make("CartPole-v1"), []
    for seed in (40_201, None, None, None):  # the seed begins the first episode, and others follow from it
        obs, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(policy.predict(obs))
            total, ended = total + float(reward), terminated or truncated
        totals.append(total)
    assert len(set(totals)) > 1
    assert found.returns.tolist() == totals[:1]
    watched = watch_policy_without_a_screen(policy, episodes=4, seed=3)
    assert [(episode.ret, episode.length) for episode in watched] == [(total, int(total)) for total in totals]
    assert found.lengths.tolist() == totals[:1]


def test_seeds_share_no_episodes(policy: SavedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    reset = CartPoleEnv.reset

    def noting(env: CartPoleEnv, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        begun.extend([] if seed is None else [seed])
        return reset(env, seed=seed, options=options)

    monkeypatch.setattr(CartPoleEnv, "reset", noting)
    for seed in (0, 1, 2, 3):
        evaluate_policy(policy, "ShortCartPole-v0", episodes=100, seed=seed)
    assert len(set(begun)) == len(begun) == 400


def test_stochastic_episodes_repeat_with_the_seed(run: Path) -> None:
    found = [
        evaluate_policy(pearl.load_policy(run, seed=seed), episodes=20, deterministic=False).returns.tolist()
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]


def test_observations_are_prepared_where_a_policy_is_watched(tmp_path: Path) -> None:
    env = gym.make("FrozenLake-v1")
    prepared = gym.wrappers.FlattenObservation(env)
    case = (WideDQN, prepared.observation_space, env.action_space)
    folder = run_folder(tmp_path / "run", case, env="FrozenLake-v1")
    policy = pearl.load_policy(folder)
    assert len(evaluate_policy(policy, episodes=3).returns) == 3
    assert len(watch_policy_without_a_screen(policy, episodes=1)) == 1


def test_another_environment_with_the_same_spaces(run: Path) -> None:
    done = command("evaluate", run, "--env", "ShortCartPole-v0", "--episodes", 4, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["lengths"] == [5, 5, 5, 5]
    assert json.loads(done.output)["weights"] == "last"
    done = command("evaluate", run, "--env", "ShortCartPole-v0", "--episodes", 4)
    assert "5.00 +- 0.00 (5.00 to 5.00)" in done.output
    assert "last weights of step 200, mean return 1.50" in " ".join(done.output.replace("|", "").split())


@pytest.mark.parametrize(
    ("env", "kind", "message"),
    [
        (
            "Acrobot-v1",
            PolicyError,
            r"takes observations of Box of shape \(4,\), float32; those of Acrobot-v1 are of Box of shape \(6,\)",
        ),
        (
            "DoublePole-v0",
            PolicyError,
            r"takes observations of Box of shape \(4,\), float32; those of DoublePole-v0 are of .*\(4,\), float64",
        ),
        ("CartPole-v7", EnvError, "CartPole-v7"),
        ("os:CartPole-v1", EnvError, "names a module to import"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(policy: SavedPolicy, env: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        evaluate_policy(policy, env)
    with pytest.raises(kind, match=message):
        watch_policy_without_a_screen(policy, env=env)


@pytest.mark.parametrize("episodes", [0, -1, 2.0, True, "3"])
def test_a_count_that_is_none_is_refused(policy: SavedPolicy, episodes: Any) -> None:
    with pytest.raises(ConfigurationError, match="episodes must be a whole number of at least 1; found"):
        evaluate_policy(policy, episodes=episodes)


@pytest.mark.parametrize("steps", [-1, 2.0, None])
def test_a_limit_of_steps_that_is_none_is_refused(policy: SavedPolicy, steps: Any) -> None:
    for play in (evaluate_policy, watch_policy):
        with pytest.raises(ConfigurationError, match="max_steps must be a whole number of at least 0; found"):
            play(policy, max_steps=steps)


def test_a_path_is_no_policy(tmp_path: Path) -> None:
    found = r"Expected a policy, as pearl\.load_policy\(RUN\) returns it; found 'runs/cartpole'"
    for call in (evaluate_policy, watch_policy, lambda run: export_policy(run, tmp_path / "policy.pt", "torchscript")):
        with pytest.raises(PolicyError, match=found):
            call("runs/cartpole")


def test_arguments_of_the_environment_and_modules_that_register_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "long_pole.py").write_text(
        "import gymnasium as gym, os\n"
        "print('a module that prints')\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "def make(limit, name='', render_mode=None):\n"
        "    assert name == 'a=b'\n"
        "    os.write(1, b'C code that prints')\n"
        "    return gym.wrappers.TimeLimit(CartPoleEnv(), limit)\n"
        "gym.register('LimitedPole-v0', make)\n"
    )
    options = ("--env", "LimitedPole-v0", "--env-kwarg", "limit=3", "--env-kwarg", "name=a=b", "--episodes", 2)
    assert "cannot be made" in command("evaluate", run, *options).output
    done = command("evaluate", run, *options, "--import", "long_pole", "--json")
    assert json.loads(done.stdout)["lengths"] == [3, 3], done.output
    assert capfd.readouterr().out == ""
    for option, text in (("--env-kwarg", "limit"), ("--env-kwarg", "=3"), ("--import", "absent_module")):
        done = command("evaluate", run, option, text)
        assert done.exit_code == 1
        assert f"Error: {option}" in done.output


def test_arguments_that_are_not_given_are_those_of_the_run(tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    case = (WideDQN, env.observation_space, env.action_space)
    run = run_folder(
        tmp_path, case, env="CartPole-v1", edit=lambda content: content["env_kwargs"].update(max_episode_steps=3)
    )
    given = ("--env-kwarg", "sutton_barto_reward=true", "--episodes", 2, "--json")
    done = command("evaluate", run, *given)
    assert [json.loads(done.stdout)[name] for name in ("lengths", "returns")] == [[3, 3], [0.0, 0.0]]
    done = command("evaluate", run, *given, "--env", "ShortCartPole-v0")
    assert json.loads(done.stdout)["lengths"] == [5, 5]


def test_an_environment_that_is_registered_nowhere_names_the_option_that_imports_it(tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    run = run_folder(tmp_path / "run", (DQN, env.observation_space, env.action_space), env="Absent-v0")
    policy = pearl.load_policy(run)
    for play in (evaluate_policy, watch_policy):
        with pytest.raises(EnvError, match=r"'Absent-v0', that of the run, is not registered here\..*--import MODULE"):
            play(policy)
    with pytest.raises(EnvError, match=r"'Missing-v0' cannot be made: .*Missing.* doesn't exist.*--import MODULE"):
        watch_policy(policy, "Missing-v0")


def test_a_trainer_class_may_be_named(run: Path) -> None:
    assert command("evaluate", run, "--trainer", "policies:WideDQN", "--episodes", 1).exit_code == 0
    for text, message in (
        ("policies", "must be MODULE:CLASS"),
        ("policies:Absent", "has no class Absent"),
        ("policies.py:WideDQN", "there is no module 'policies.py' in"),
    ):
        assert message in command("evaluate", run, "--trainer", text).output


def test_videos_are_recorded(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    done = command("enjoy", run, "--video", tmp_path / "videos", "--episodes", 2)
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "videos").glob("*.mp4"))
    assert [file.name for file in files] == [f"CartPole-v1-last-episode-{number}.mp4" for number in (0, 1)]
    assert all(b"ftyp" in file.read_bytes()[:12] for file in files)
    assert all(f"steps, {file}" in done.output for file in files)
    with pytest.raises(PolicyError, match=r"Videos cannot be written into .*policy\.json.*Name another folder"):
        watch_policy(pearl.load_policy(run), video=run / "policy.json" / "videos")


def wandering_pole(folder: str, render_mode: str | None = None) -> gym.Env[Any, Any]:
    os.chdir(folder)
    return CartPoleEnv(render_mode=render_mode)


def test_videos_are_in_the_named_folder_also_if_the_environment_changes_the_working_directory(
    policy: SavedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moviepy")
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    kwargs = {"folder": str(tmp_path / "elsewhere")}
    watched = watch_policy(policy, wandering_pole, env_kwargs=kwargs, episodes=1, max_steps=2, video="videos")
    files = [episode.video for episode in watched]
    assert [file.parent for file in files if file is not None and file.is_file()] == [tmp_path / "here" / "videos"]


def test_a_missing_extra_names_the_command(
    policy: SavedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(MissingExtraError, match=r"moviepy is not installed.*pip install 'pearl-toolkit\[video\]'"):
        watch_policy(policy, video=tmp_path)


def test_an_environment_without_pictures_is_refused(policy: SavedPolicy, caplog: pytest.LogCaptureFixture) -> None:
    gym.register("BlindPole-v0", lambda render_mode=None: Blind())
    with pytest.raises(EnvError, match=r'needs render_mode="human"; BlindPole-v0 has no render modes'):
        watch_policy(policy, "BlindPole-v0")
    assert caplog.messages == ["BlindPole-v0 failed in close(): RuntimeError: stays open"]


class Blind(gym.Env[Any, Any]):
    observation_space = gym.make("CartPole-v1").observation_space
    action_space = gym.make("CartPole-v1").action_space

    def close(self) -> None:
        raise RuntimeError("stays open")
