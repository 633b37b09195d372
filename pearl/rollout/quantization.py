"""HEPPO-GAE's standardisation and quantisation of rewards and values (Sec. II)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

RANGE = 4.0
"""Standard deviations on each side of 0 that a code covers: a normal number lies outside with probability 6e-5."""


@dataclass
class RunningStatistics:
    """Mean and deviation of all numbers so far (Welford 1962; HEPPO-GAE, Eq. 6 to 9), exact for a block at a time."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # S_n: the sum of squared distances to the mean

    def add(self, block: np.ndarray) -> None:
        """Take the numbers of `block` in; the result does not depend on how they are divided into blocks."""
        numbers = block.astype(np.float64).ravel()
        if not numbers.size:
            return
        total = self.count + numbers.size
        mean = float(numbers.mean())
        distance = mean - self.mean
        self.squares += float(np.square(numbers - mean).sum()) + distance**2 * self.count * numbers.size / total
        self.mean += distance * numbers.size / total
        self.count = total

    @property
    def deviation(self) -> float:
        """sqrt(S_n / n); 1 where all numbers were equal, so that dividing by it is safe."""
        variance = self.squares / self.count if self.count else 0.0
        return math.sqrt(variance) if variance > 0 and math.isfinite(variance) else 1.0


@dataclass(frozen=True)
class Codes:
    """Quantised numbers: `codes` `(horizon, envs)` uint8 or uint16 stand for `offset + scale * code`.

    `saturated` is how many lay outside the range and were moved to its end.
    """

    codes: np.ndarray
    offset: float
    scale: float
    saturated: int = 0

    def decoded(self) -> np.ndarray:
        """The numbers `(horizon, envs)` float32 that the codes stand for, as the kernels compute them."""
        return np.float32(self.offset) + np.float32(self.scale) * self.codes.astype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes; the quarter of float32 for up to 8 bits."""
        return self.codes.nbytes


def quantized(numbers: np.ndarray, bits: int, mean: float, deviation: float, *, restored: bool) -> Codes:
    """Standardise by `mean` and `deviation`, and round to `2**bits` equal steps within RANGE deviations.

    The codes stand for the standardised numbers, or for the numbers themselves if `restored`.
    """
    levels = 2**bits - 1
    step = 2.0 * RANGE / levels
    places = np.rint(((numbers.astype(np.float64) - mean) / deviation + RANGE) / step)
    saturated = int(np.count_nonzero((places < 0) | (places > levels)))
    codes = np.clip(places, 0, levels).astype(np.uint8 if bits <= 8 else np.uint16)
    scale = deviation if restored else 1.0
    return Codes(codes, (mean if restored else 0.0) - RANGE * scale, step * scale, saturated)
