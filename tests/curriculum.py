"""An environment with attributes that callbacks of tests set, and such a callback."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.callbacks import Callback, RunContext

STEPS = 4


class Stairs(gym.Env[np.ndarray, int]):
    """Each of four steps earns the level that the episode began with."""

    def __init__(self, level: float = 1.0) -> None:
        self.observation_space = spaces.Box(0, 100, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.level = level
        self._most = 50
        self._played = level

    @property
    def most(self) -> int:
        return self._most

    @most.setter
    def most(self, value: int) -> None:
        if value < 1:
            raise ValueError("at least one step")
        self._most = value

    @property
    def half(self) -> float:
        return self.level / 2

    def _observe(self) -> np.ndarray:
        return np.array([self._played, self._steps], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._played = 0, self.level
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observe(), self._played, self._steps == STEPS, False, {}


class Rising(Callback):
    """Raises the level to 3, and notes what the episodes then earn."""

    def on_start(self, run: RunContext) -> None:
        self.began_with = dict(run.env_attributes)

    def on_step(self, run: RunContext) -> None:
        if run.env_steps >= 100 and "level" not in run.env_attributes:
            run.set_env_attributes(level=3.0)

    def on_end(self, run: RunContext) -> None:
        found = {"began with": self.began_with, "have": dict(run.env_attributes), "mean": run.mean_return}
        (run.run_dir / "stairs.json").write_text(json.dumps(found))
