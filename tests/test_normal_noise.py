"""The learners' noise: against the transform written out in float64, its distribution, and what it depends on."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl import _native
from pearl.replay.reference import philox4x32

COUNT = 200_000


def reference(seed: int, step: int, draw: int, count: int) -> np.ndarray:
    """Box and Muller's transform of the words of Philox counters (block, draw, step); a block gives four numbers."""
    counters = np.zeros((-(-count // 4), 4), np.uint64)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1:] = draw, step & 0xFFFFFFFF, step >> 32
    words = philox4x32(counters, seed).reshape(-1, 2).astype(np.uint32)
    uniform = ((words[:, 0] >> 1).astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-31
    # The circle's directions start an eighth of a turn before 0.
    angle = np.pi / 2 * ((words[:, 1] >> 30) + (words[:, 1] << 2).view(np.int32) * 2.0**-32)
    radius = np.sqrt(-2 * np.log(uniform))
    numbers: np.ndarray = (radius[:, None] * np.stack((np.cos(angle), np.sin(angle)), 1)).reshape(-1)[:count]
    return numbers


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1), step=st.integers(0, 2**63 - 1), draw=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 600), size=st.integers(1, 7),
)  # fmt: skip
def test_it_is_the_transform_of_philox_words(seed: int, step: int, draw: int, rows: int, size: int) -> None:
    found = _native.normal_noise(seed, step, draw, rows, size)
    assert found.shape == (rows, size)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.reshape(-1), reference(seed, step, draw, rows * size), rtol=1e-5, atol=1e-6)


def test_its_distribution_is_the_standard_normal() -> None:
    found = _native.normal_noise(11, 5, 0, COUNT, 1)[:, 0].astype(np.float64)
    # Six standard errors each; of the fourth moment, whose own variance is 96 / n.
    assert abs(found.mean()) < 6 / math.sqrt(COUNT)
    assert abs(found.var() - 1) < 6 * math.sqrt(2 / COUNT)
    assert abs((found**3).mean()) < 6 * math.sqrt(15 / COUNT)
    assert abs((found**4).mean() - 3) < 6 * math.sqrt(96 / COUNT)
    assert 4 < np.abs(found).max() < 6.7
    # Kolmogorov and Smirnov's test at 0.1 %.
    exact = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in np.sort(found)])
    steps = np.arange(COUNT + 1) / COUNT
    distance = max(float((steps[1:] - exact).max()), float((exact - steps[:-1]).max()))
    assert distance < 1.95 / math.sqrt(COUNT)


def test_seeds_steps_draws_rows_and_columns_are_independent() -> None:
    whole = _native.normal_noise(1, 0, 0, COUNT, 4).astype(np.float64)
    named = {
        "another seed": _native.normal_noise(2, 0, 0, COUNT, 1)[:, 0],
        "another step": _native.normal_noise(1, 1, 0, COUNT, 1)[:, 0],
        "a step beyond 32 bits": _native.normal_noise(1, 2**32, 0, COUNT, 1)[:, 0],
        "another draw": _native.normal_noise(1, 0, 1, COUNT, 1)[:, 0],
        "the row before": np.roll(whole[:, 0], 1),
        **{f"column {i}": whole[:, i] for i in range(4)},
    }
    for (first, x), (second, y) in itertools.combinations(named.items(), 2):
        # The squares, too: two numbers that share a radius would be uncorrelated themselves.
        for power in (1, 2):
            correlation = np.corrcoef(np.asarray(x, np.float64) ** power, np.asarray(y, np.float64) ** power)[0, 1]
            assert abs(correlation) < 5 / math.sqrt(COUNT), f"{first} and {second}, to the power of {power}"


def test_a_number_does_not_depend_on_how_many_rows_are_drawn() -> None:
    many = _native.normal_noise(3, 4, 5, 1000, 3)
    for rows in (0, 1, 85, 86, 999):
        np.testing.assert_array_equal(_native.normal_noise(3, 4, 5, rows, 3), many[:rows])


@pytest.mark.parametrize("wrong", [(-1, 0, 0, 1, 1), (0, -1, 0, 1, 1), (0, 0, 2**32, 1, 1), (0, 0, 0, -1, 1)])
def test_numbers_out_of_range_are_refused(wrong: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(TypeError, match="normal_noise"):
        _native.normal_noise(*wrong)
