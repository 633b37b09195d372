"""Environments that normalise by running statistics: nobody shares them, and the user is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import wrappers
from gymnasium.wrappers import vector as vector_wrappers
from programs import make_program, run
from trainers import OwnTrainer

from pearl import load_policy
from pearl.actors.normalization import normalization_warnings
from pearl.errors import PolicyError

Env = gym.Env[Any, Any]


class OwnNormalization(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper of the user's own, with both kinds of statistics."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.obs_rms, self.ret_rms = object(), object()


class PassesOn(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that shows what it wraps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def frozen(env: Env) -> Env:
    wrapped = wrappers.NormalizeObservation(env)
    wrapped.update_running_mean = False
    return wrapped


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda env: env, []),
        (wrappers.NormalizeObservation, ["observations by NormalizeObservation"]),
        (wrappers.NormalizeReward, ["rewards by NormalizeReward"]),
        (
            lambda env: PassesOn(wrappers.TimeAwareObservation(wrappers.NormalizeObservation(env))),
            ["observations by NormalizeObservation"],
        ),
        (OwnNormalization, ["observations by OwnNormalization", "rewards by OwnNormalization"]),
        (frozen, []),
        (lambda env: wrappers.TransformReward(env, lambda r: r / 10), []),
    ],
)
def test_what_normalises_by_running_statistics_is_named(wrap: Callable[[Env], Env], named: list[str]) -> None:
    envs = gym.vector.SyncVectorEnv([lambda: wrap(gym.make("Pendulum-v1"))] * 2)
    found = normalization_warnings(envs, "Mine-v0")
    assert len(found) == len(named)
    for warning, name in zip(found, named, strict=True):
        assert warning.startswith(f"The environment Mine-v0 normalises {name}")
        assert "Remove the wrapper" in warning
    envs.close()


def test_a_vector_that_normalises_is_named_too() -> None:
    plain = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    envs = vector_wrappers.NormalizeReward(vector_wrappers.NormalizeObservation(plain))
    first, second = normalization_warnings(envs, "CartPole-v1")
    assert "rewards by NormalizeReward" in first
    assert "observations by NormalizeObservation" in second
    envs.close()


def test_composing_and_running_say_so(tmp_path: Path, quick_profiles: None, caplog: pytest.LogCaptureFixture) -> None:
    program = make_program(tmp_path, trainer=OwnTrainer, env="NormalizedCounting-v0", training={"batch_size": 16})
    warned = [f"NormalizedCounting-v0 normalises {what}" for what in ("rewards by Norm", "observations by Norm")]
    assert all(text in caplog.text for text in warned)
    code, output = run(program, "--serial", "--timesteps", "100", "--eval-episodes", "0", "--run-dir", str(tmp_path))
    assert code == 0, output
    assert all(text in output for text in warned)
    assert all(text in (tmp_path / "run.log").read_text() for text in warned)
    with pytest.raises(PolicyError, match=r"NormalizeObservation normalised by running statistics, which no run keeps"):
        load_policy(tmp_path)
