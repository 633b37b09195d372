"""Finds wrappers that normalise by statistics of their own, which no other copy of the environment shares."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

# Attributes that hold running statistics in the wrappers of Gymnasium and of Stable-Baselines3.
_OF_OBSERVATIONS = ("obs_rms",)
_OF_REWARDS = ("return_rms", "ret_rms", "reward_rms")
_LEARNING = ("update_running_mean", "training")  # False: the statistics are frozen
# In these a wrapper or vector holds what it wraps.
_INNER = ("env", "venv", "envs")
_DEEPEST = 100


def normalization_warnings(vector: gym.vector.VectorEnv[Any, Any, Any], env: str) -> tuple[str, ...]:
    """One warning for each wrapper of `vector`'s environments that normalises by running statistics.

    Every copy of the environment counts statistics of its own: the actors' copies differ from each other, and those of
    evaluations start from nothing. Wrappers whose statistics are frozen are left out: they do the same in every copy.
    """
    found: dict[str, None] = {}
    for layer in _layers(vector):
        name = type(layer).__name__
        if not _learns(layer):
            continue
        if _has(layer, _OF_OBSERVATIONS):
            found[
                f"The environment {env} normalises observations by {name}, whose running statistics PEARL does not "
                "share: each copy has its own, and those of evaluations start from nothing. The policy sees other "
                "numbers in evaluations than in training, and its scores say little. Remove the wrapper; scale by "
                "constants instead, with gymnasium.wrappers.TransformObservation or the trainer's scale_observations."
            ] = None
        if _has(layer, _OF_REWARDS):
            found[
                f"The environment {env} normalises rewards by {name}, whose running statistics PEARL does not share: "
                "each copy has its own. All returns that are reported, and compared with a goal, are of normalised "
                "rewards, evaluations too. Remove the wrapper; scale by a constant instead, with "
                "gymnasium.wrappers.TransformReward."
            ] = None
    return tuple(found)


def observation_normalizers(vector: gym.vector.VectorEnv[Any, Any, Any]) -> tuple[str, ...]:
    """The wrappers of `vector`'s environments that normalise observations by running statistics, by class name."""
    return tuple(type(layer).__name__ for layer in _layers(vector) if _learns(layer) and _has(layer, _OF_OBSERVATIONS))


def _learns(layer: object) -> bool:
    return not any(getattr(layer, name, True) is False for name in _LEARNING)


def _layers(vector: object) -> Iterator[object]:
    """The vector, its wrappers, and those of its first environment, from the outside in."""
    layer: object = vector
    for _ in range(_DEEPEST):
        yield layer
        inner = next((held for name in _INNER if (held := vars(layer).get(name)) is not None), None)
        layer = inner[0] if isinstance(inner, list | tuple) and inner else inner
        if layer is None or not hasattr(layer, "__dict__"):
            return


def _has(layer: object, names: tuple[str, ...]) -> bool:
    # Static: wrappers that pass attributes on must not show what they wrap.
    return any(inspect.getattr_static(layer, name, None) is not None for name in names)
