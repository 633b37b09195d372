"""Interquartile means over seeds, with bootstrap intervals (Agarwal et al. 2021, "Deep RL at the edge").

The same as rliable's, by SciPy: rliable 1.2.0 does not run with the NumPy 2 and pandas 3 of this project's pins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

RESAMPLES = 10_000
CONFIDENCE = 0.95


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean without the lowest and the highest quarter (rounded down) along `axis`."""
    found: np.ndarray = stats.trim_mean(values, 0.25, axis=axis)
    return found


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The percentile bootstrap interval of the interquartile mean of one number per seed."""
    sample = np.asarray(values, float)
    again = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    return _percentiles(interquartile_mean(sample[again]))


def probability_of_improvement(
    ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> tuple[float, tuple[float, float]]:
    """How probably a run of ours has the higher score, averaged over tasks, with its interval; ties count half.

    `ours` and `theirs` have the scores of each task's seeds. Seeds are resampled within each task.
    """
    rng = np.random.default_rng(0)
    middle, again = 0.0, np.zeros(RESAMPLES)
    for a, b in zip(ours, theirs, strict=True):
        wins = (np.sign(a[:, None] - b[None, :]) + 1.0) / 2.0
        rows = rng.integers(len(a), size=(RESAMPLES, len(a), 1))
        columns = rng.integers(len(b), size=(RESAMPLES, 1, len(b)))
        middle += wins.mean()
        again += wins[rows, columns].mean(axis=(1, 2))
    return middle / len(ours), _percentiles(again / len(ours))


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    outside = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(values, (outside, 100.0 - outside))
    return float(low), float(high)
