"""Atari games by Gymnasium's wrappers, with the observations of a vector that prepares frames itself.

Vectors of games show no screen. An episode is watched in these environments instead: whole games, with the rewards of
the game.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from pearl.errors import EnvError


@dataclass(frozen=True)
class Preprocessing:
    """How frames become observations `(stack, height, width)`, or `(stack, height, width, 3)` in colour."""

    height: int = 84
    width: int = 84
    frame_skip: int = 4
    stack: int = 4
    noop_max: int = 30
    grayscale: bool = True
    fire_reset: bool = False


def make_game(name: str, options: Mapping[str, Any], frames: Preprocessing, render_mode: str) -> gym.Env[Any, Any]:
    """The game of this registered name, whose screen is rendered. `options` are those of the game."""
    game: gym.Env[Any, Any] = gym.make(name, **{**options, "frameskip": 1, "render_mode": render_mode})
    if frames.fire_reset and "FIRE" in game.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
        game = _FireReset(game)
    prepared: gym.Env[Any, Any] = AtariPreprocessing(
        game,
        noop_max=frames.noop_max,
        frame_skip=frames.frame_skip,
        screen_size=(frames.width, frames.height),
        grayscale_obs=frames.grayscale,
    )
    return FrameStackObservation(prepared, frames.stack, padding_type="zero")


def check_counterpart(options: Mapping[str, Any], name: str, value: object) -> None:
    """Raise EnvError if the vector's option `name` is set to anything but `value`, all that the wrappers have."""
    if options.get(name, value) != value:
        raise EnvError(
            f"The run's frames were prepared with {name}={options[name]!r}, for which Gymnasium's wrappers, which show "
            f"the game, have no counterpart: they have {value!r}. Evaluate without a picture (pearl evaluate)."
        )


class _FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Begins each game with the button that serves the ball."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a game, and press the button."""
        self.env.reset(seed=seed, options=options)
        fire = self.env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        obs, _, terminated, truncated, info = self.env.step(fire)
        return self.env.reset() if terminated or truncated else (obs, info)
