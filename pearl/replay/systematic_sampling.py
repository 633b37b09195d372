"""Deville's systematic sampling in NumPy: batches without repetition, drawn stratum by stratum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def sample_systematically(random: Words, masses: Words, count: int) -> tuple[NDArray[np.int64], int]:
    """Return `(count,)` different indices of positive `masses`, and the largest mass that counts for a weight.

    Index i is drawn with probability `count * masses[i] / sum(masses)`. If that is 1 or more, it is drawn for certain,
    and the other draws are distributed over the other indices in the same way. `random` is uint64 `(2 * count,)`.

    The other masses are cut into strata of equal mass, one for each draw. A mass that crosses the border of two strata
    is drawn in the second with a probability that depends on whether it was drawn in the first: so it is never drawn
    twice and keeps its probability (Deville 1998; Chauvet, "On a characterization of ordered pivotal sampling", 2012).
    """
    masses, certain = masses.copy(), list[int]()
    while True:
        left, ends = count - len(certain), np.cumsum(masses)
        total = int(ends[-1])
        if left == 0:
            return np.array(certain, np.int64), 1
        borders = _find(ends, [k * total // left for k in range(left)])
        whole = [slot for slot in dict.fromkeys(borders) if int(masses[slot]) * left >= total]
        if not whole:
            break
        certain += whole
        masses[whole] = 0
    # Positions in units of 1 / left: the k-th stratum is [k * total, (k + 1) * total).
    points, turns = [], []
    for k, slot in enumerate(borders):
        mass = int(masses[slot]) * left
        before = k * total - (int(ends[slot]) * left - mass)  # the part of the border's mass that lies before it
        behind = mass - before if before else 0
        points.append((k * total + behind + _scaled(random[k], total - behind)) // left)
        turns.append(_scaled(random[count + k], total - before) < behind)
    drawn: list[int] = []
    for slot, border, turn in zip(_find(ends, points), borders, turns, strict=True):
        drawn.append(border if turn and drawn[-1] != border else slot)
    return np.array(certain + drawn, np.int64), total // left


def _find(ends: Words, targets: list[int]) -> list[int]:
    slots: list[int] = np.searchsorted(ends, np.array(targets, np.uint64), side="right").tolist()
    return slots


def _scaled(random: np.uint64, bound: int) -> int:
    return int(random) * bound >> 64
