"""Pong from its screen, preprocessed as in Mnih et al. 2015, registered for benchmarks where `ale-py` is installed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from pearl.algorithms import DQN

ENV = "BenchmarkPong-v0"


class PongDQN(DQN):
    """DQN with the Nature CNN; its module registers the environment, in actors too."""

    double = False


def make_pong(**options: Any) -> gym.Env[Any, Any]:
    """Observations `(4, 84, 84)` uint8: the last four frames of every fourth, grey."""
    import ale_py

    gym.register_envs(ale_py)
    frames = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **options)
    return FrameStackObservation(AtariPreprocessing(frames), 4)


def missing() -> str:
    """Why Pong cannot be had here; empty if it can."""
    try:
        make_pong().close()
    except Exception as error:  # Gymnasium wraps what is not installed in errors of several kinds
        return f"{type(error).__name__}: {error}"
    return ""


gym.register(ENV, entry_point=make_pong)
