"""Converts a policy's actions to the environment's. Policies count choices from 0; rounding may exceed bounds."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def first_action(action_space: gym.Space[Any]) -> int | np.ndarray:
    """The space's own number of the action that policies call 0."""
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.start)
    if isinstance(action_space, spaces.MultiDiscrete) and np.any(action_space.start):
        return np.asarray(action_space.start)
    return 0


class EnvironmentActions:
    """Converts a policy's actions `(n, *action)` to the numbering, the dtype and the bounds of `space`.

    Returns copies of arrays, since environments may change them.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        first, self._dtype = first_action(space), space.dtype
        self._first = first if np.any(first) else None
        self._bounds = (space.low, space.high) if isinstance(space, spaces.Box) else None
        self._rounds = self._dtype is not None and np.issubdtype(self._dtype, np.floating)
        self._are_numbers = isinstance(space, spaces.Discrete)

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        """The converted actions; for a Discrete space the same array if nothing differs."""
        if self._bounds is None:
            shifted: np.ndarray = actions if self._first is None else actions + self._first
            return shifted.astype(self._dtype, copy=not self._are_numbers)
        # Convert floats before clipping, since rounding may leave the bounds; integers after, since unclipped ones may
        # overflow.
        rounded = actions.astype(self._dtype, copy=False) if self._rounds else actions
        low, high = self._bounds
        clipped: np.ndarray = np.minimum(np.maximum(rounded, low), high)  # as np.clip, in half the time
        return clipped.astype(self._dtype, copy=False)
