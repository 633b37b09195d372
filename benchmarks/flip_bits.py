"""The bit-flipping environment of Andrychowicz et al. 2017 (Sec. 3.1), and how `benchmarks.goals` trains in it.

It is registered as FlipBits-v0, and as FlipBits10-v0 and FlipBits15-v0 by its bits.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

BITS = (10, 15)
STEPS = 40_000
BATCH, STARTS, GAMMA, RATE, TARGETS, SLOTS, GOALS = 64, 1_000, 0.95, 1e-3, 500, 100_000, 4
EXPLORING, LEAST_EPSILON = 5_000, 0.05
SIZES = (64, 64)


class FlipBits(gym.Env[dict[str, np.ndarray], np.int64]):
    """Each action flips a bit; -1 for each step, but 0 for the one that makes all bits those of the goal, and ends.

    Bits and goal are random. An episode has as many steps as bits at most.
    """

    def __init__(self, bits: int = 10) -> None:
        part = spaces.MultiBinary(bits)
        self.observation_space = spaces.Dict({"achieved_goal": part, "desired_goal": part})
        self.action_space, self._bits = spaces.Discrete(bits), bits

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Draw bits and goal."""
        super().reset(seed=seed)
        self._state, self._goal = self.np_random.integers(0, 2, (2, self._bits), np.int8)
        self._step = 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Flip bit `action`."""
        self._state[action] ^= 1
        self._step += 1
        reward = float(self.compute_reward(self._state, self._goal, {}))
        return self._seen(), reward, reward == 0.0, self._step == self._bits, {}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> Any:
        """0 where all bits agree, else -1; of one pair of goals `(bits,)`, or of many `(n, bits)`."""
        return np.all(achieved_goal == desired_goal, axis=-1) - 1.0

    def _seen(self) -> dict[str, np.ndarray]:
        return {"achieved_goal": self._state.copy(), "desired_goal": self._goal.copy()}


gym.register("FlipBits-v0", FlipBits)


def environment_of(bits: int) -> str:
    """The registered name of the environment with so many bits."""
    return f"FlipBits{bits}-v0"


def return_of(bits: int) -> float:
    """The mean return that counts as solved."""
    return 0.5 - bits / 2


for _bits in BITS:
    gym.register(environment_of(_bits), FlipBits, kwargs={"bits": _bits})
