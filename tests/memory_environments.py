"""Environments that a policy without memory cannot solve. They bring no torch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class RememberCue(gym.Env[np.ndarray, np.int64]):
    """The first observation shows a cue, -1 or 1; `delay` steps later the action must be the one that it stood for.

    Observations are the cue (0 after the first step) and whether the next action counts. The return is 1 or -1, so a
    policy without memory reaches 0 on average.
    """

    def __init__(self, delay: int = 4) -> None:
        self.observation_space, self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
        self._delay = delay

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._wanted, self._step = int(self.np_random.integers(2)), 0
        return self._seen(2.0 * self._wanted - 1.0), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        ends = self._step == self._delay
        reward = (1.0 if int(action) == self._wanted else -1.0) if ends else 0.0
        self._step += 1
        return self._seen(0.0), reward, ends, False, {}

    def _seen(self, cue: float) -> np.ndarray:
        return np.array([cue, float(self._step == self._delay)], np.float32)


def next_step_vector(num_envs: int = 1, **kwargs: Any) -> gym.vector.SyncVectorEnv:
    """A vector that resets in the step after an episode's end."""
    makers = [lambda: RememberCue(**kwargs)] * num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)


gym.register("PearlCue-v0", RememberCue, vector_entry_point=next_step_vector, disable_env_checker=True)
