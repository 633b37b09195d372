"""Count, mean and squared distances of the numbers so far, as one vector that processes can exchange."""

from __future__ import annotations

import math

import numpy as np

OBSERVATION_CLIP = 10.0  # normalised observations lie within so many deviations
REWARD_CLIP = 10.0  # normalised rewards lie within so many deviations of the discounted return
ADDED_VARIANCE = 1e-8  # as VecNormalize's epsilon: numbers that hardly change are scaled by 10,000 at most
ROUNDING_VARIANCE = 1e-16  # up to which an element never changed: sums of equal numbers are rounded


class Moments:
    """Count, mean and sum of squared distances to the mean of all items of `shape` so far (Chan et al. 1979).

    `flat` `(1 + 2 * size,)` float64 holds the count, the means and the sums, one after the other; the others are views
    of it.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        size = math.prod(shape)
        self.flat = np.zeros(1 + 2 * size)
        self.mean, self.squares = (part.reshape(shape) for part in np.split(self.flat[1:], 2))

    @property
    def count(self) -> float:
        """Items so far."""
        return float(self.flat[0])

    def add(self, items: np.ndarray) -> None:
        """Take `(rows, *shape)` in."""
        if not len(items):
            return
        block = items.astype(np.float64)
        mean = block.mean(axis=0)
        self._merge(len(block), mean, np.square(block - mean).sum(axis=0))

    def merge(self, flat: np.ndarray) -> None:
        """Take in the items of another one, whose vector is `flat`."""
        if flat[0] > 0:
            mean, squares = (part.reshape(self.mean.shape) for part in np.split(flat[1:], 2))
            self._merge(float(flat[0]), mean, squares)

    def _merge(self, count: float, mean: np.ndarray, squares: np.ndarray) -> None:
        total, distance = self.count + count, mean - self.mean
        self.squares += squares + np.square(distance) * (self.count * count / total)
        self.mean += distance * (count / total)
        self.flat[0] = total

    @property
    def scale(self) -> np.ndarray:
        """One over the deviation `(*shape,)`; 1 of elements that never changed."""
        return scale_of(self.squares / max(self.count, 1.0))


def scale_of(variance: np.ndarray) -> np.ndarray:
    """One over the deviation, which is at least 1e-4; 1 where nothing changed."""
    return np.asarray(1.0 / np.sqrt(np.where(variance > ROUNDING_VARIANCE, variance + ADDED_VARIANCE, 1.0)))


def normalized(obs: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Observations `(n, *obs)` float32, shifted by `mean`, scaled, and clipped to 10 deviations."""
    found: np.ndarray = np.clip((obs - mean) * scale, -OBSERVATION_CLIP, OBSERVATION_CLIP, dtype=np.float32)
    return found
