"""The spaces that the built-in algorithms take, and messages that say how to adapt other spaces."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.errors import EnvError

ActionKind: TypeAlias = Literal["Discrete", "Box", "MultiDiscrete", "MultiBinary"]


def is_bounded(space: spaces.Box) -> bool:
    """Whether all bounds are finite, and their distances too: the bounds of float32 itself, for example, bound nothing.

    Policies and exploration scale actions by those distances, in float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite((space.high - space.low).astype(np.float32)).all())


def check_observations(name: str, space: gym.Space[Any]) -> None:
    """Raise EnvError unless the built-in algorithms, here the class `name`, can observe `space`."""
    if not isinstance(space, spaces.Box):
        raise EnvError(
            f"{name} needs Box observations; the environment has {space}. "
            "Wrap it, for example with gymnasium.wrappers.FlattenObservation."
        )
    if not space.shape:
        raise EnvError(
            f"{name} needs observations of one dimension or more; the environment has {space}, of shape (). "
            "Wrap it with gymnasium.wrappers.ReshapeObservation(env, (1,))."
        )
    if 0 in space.shape:
        raise EnvError(f"{name} needs observations that hold numbers; the environment has {space}, which holds none.")


def check_holds_numbers(name: str, space: gym.Space[Any]) -> None:
    """Raise EnvError if actions of `space` hold no number for the class `name` to choose."""
    if 0 in (space.shape or ()):
        raise EnvError(f"{name} needs actions that hold numbers; the environment has {space}, which holds none.")


def check_actions(name: str, algorithm: str, wanted: ActionKind, space: gym.Space[Any]) -> None:
    """Raise EnvError, naming algorithms that can, unless `algorithm`, here the class `name`, can act in `space`."""
    from pearl.algorithms import algorithms_for, one_of_algorithms

    kind: ActionKind
    if isinstance(space, spaces.Discrete):
        kind = "Discrete"
    elif isinstance(space, spaces.Box):
        kind = "Box"
    else:
        discrete, continuous, several, switches = (", ".join(algorithms_for(kind)) for kind in get_args(ActionKind))
        raise EnvError(
            f"{name} cannot act in {space}. The built-in algorithms take Discrete actions ({discrete}), bounded Box "
            f"actions ({continuous}), MultiDiscrete actions ({several}) or MultiBinary actions ({switches}). Wrap the "
            "environment with a gymnasium.ActionWrapper that offers one of these, such as a Discrete number for each "
            "combination, or bring a trainer class of your own that makes such actions."
        )
    if kind != wanted:
        described = "a Discrete" if wanted == "Discrete" else "a Box"
        raise EnvError(
            f"{name} is a {algorithm} and needs {described} action space; the environment has {space}. "
            f"For {'discrete' if kind == 'Discrete' else 'continuous'} actions derive from "
            f"pearl.algorithms.{one_of_algorithms(kind)}."
        )
    check_holds_numbers(name, space)
    if space.shape == () and kind == "Box":
        raise EnvError(
            f"{name} needs actions of one dimension or more; the environment has {space}, of shape (). "
            "Wrap it with a gymnasium.ActionWrapper that takes actions of shape (1,)."
        )
    if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        raise EnvError(
            f"{name} needs actions of floating point; the environment has {space}. "
            "Wrap it with a gymnasium.ActionWrapper that takes float32 and rounds, or offers a Discrete space."
        )
    if isinstance(space, spaces.Box) and not is_bounded(space):
        raise EnvError(
            f"{name} needs bounded actions; the environment has {space}. "
            "Give its action space finite bounds, for example with a gymnasium.ActionWrapper that states them."
        )
