"""What environments are given for a policy's actions, which count choices from 0 and may miss bounds by rounding."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def first_action(action_space: gym.Space[Any]) -> int | np.ndarray:
    """What the space's action 0 is called; policies count from 0."""
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.start)
    if isinstance(action_space, spaces.MultiDiscrete) and np.any(action_space.start):
        return np.asarray(action_space.start)
    return 0


class EnvironmentActions:
    """Turns a policy's actions `(n, *action)` into those of `space`: in its numbers, its dtype and a Box's bounds.

    Environments may change arrays that they are given: they get copies.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        first, self._dtype = first_action(space), space.dtype
        self._first = first if np.any(first) else None
        self._bounds = (space.low, space.high) if isinstance(space, spaces.Box) else None
        self._rounds = self._dtype is not None and np.issubdtype(self._dtype, np.floating)
        self._are_numbers = isinstance(space, spaces.Discrete)

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        """Those actions; of a Discrete space the same array where nothing differs."""
        if self._bounds is None:
            shifted: np.ndarray = actions if self._first is None else actions + self._first
            return shifted.astype(self._dtype, copy=not self._are_numbers)
        # Rounded before, as that may leave the bounds; whole numbers after, as those of other dtypes may not fit.
        rounded = actions.astype(self._dtype, copy=False) if self._rounds else actions
        low, high = self._bounds
        clipped: np.ndarray = np.minimum(np.maximum(rounded, low), high)  # as np.clip, in half the time
        return clipped.astype(self._dtype, copy=False)
