"""Pong from pixels, preprocessed as in Mnih et al. 2015; needs `ale-py`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from pearl.algorithms import DQN

ENV = "BenchmarkPong-v0"


class PongDQN(DQN):
    """DQN with the Nature CNN. Importing its module registers the environment, also in actor processes."""

    double = False


def make_pong(**options: Any) -> gym.Env[Any, Any]:
    """Observations `(4, 84, 84)` uint8: the last four grey frames; each action lasts four frames."""
    import ale_py

    gym.register_envs(ale_py)
    frames = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **options)
    return FrameStackObservation(AtariPreprocessing(frames), 4)


def missing() -> str:
    """Why Pong cannot be made here; empty if it can."""
    try:
        make_pong().close()
    except Exception as error:  # Gymnasium raises several kinds of errors for missing packages
        return f"{type(error).__name__}: {error}"
    return ""


gym.register(ENV, entry_point=make_pong)
