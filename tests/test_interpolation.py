"""Times for sizes that were not measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.interpolation import BATCH_SIZE, CAPACITY, Axis, along, interpolate
from composer.measurement import Measurement

SIZES = st.lists(st.integers(1, 1 << 16), min_size=1, max_size=6, unique=True)
TIMES = st.floats(0.0, 1e9)
AXES = st.sampled_from([BATCH_SIZE, CAPACITY])


def of(value_us: float) -> Measurement:
    return Measurement(value_us, value_us * 0.9, value_us * 1.1, 50, "imported")


@given(axis=AXES, sizes=SIZES, data=st.data())
def test_times_rise_wherever_the_measured_ones_do(axis: Axis, sizes: list[int], data: st.DataObject) -> None:
    times = sorted(data.draw(st.lists(TIMES, min_size=len(sizes), max_size=len(sizes))))
    points = dict(zip(sorted(sizes), map(of, times), strict=True))
    asked = sorted(data.draw(st.lists(st.integers(1, 1 << 17), min_size=2, max_size=8)) + sizes)
    found = [along(axis, points, size).value_us for size in asked]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(found))


@given(axis=AXES, sizes=SIZES, data=st.data())
def test_a_time_between_two_sizes_is_between_their_times_and_says_so(
    axis: Axis, sizes: list[int], data: st.DataObject
) -> None:
    points = {size: of(data.draw(TIMES)) for size in sizes}
    at = data.draw(st.integers(min(sizes), max(sizes)))
    found = along(axis, points, at)
    if at in points:
        assert found == points[at]
        return
    ends = [points[max(s for s in sizes if s < at)], points[min(s for s in sizes if s > at)]]
    low, high = sorted(end.value_us for end in ends)
    assert low * (1 - 1e-9) <= found.value_us <= high * (1 + 1e-9)
    assert found.note.startswith(f"interpolated: {axis.name} ")
    assert found.samples is None


@pytest.mark.parametrize(
    ("axis", "points", "at", "expected", "note"),
    [
        (BATCH_SIZE, {32: 10.0, 64: 18.0}, 48, 14.0, "interpolated: batch 32 to 64"),
        (BATCH_SIZE, {32: 10.0, 64: 18.0}, 128, 34.0, "extrapolated: batch above 64"),
        (BATCH_SIZE, {32: 10.0, 64: 18.0}, 16, 10.0, "extrapolated: batch below 32"),
        (BATCH_SIZE, {32: 10.0}, 64, 20.0, "extrapolated: batch above 32"),
        (BATCH_SIZE, {32: 10.0, 64: 9.0}, 128, 9.0, "extrapolated: batch above 64"),
        (CAPACITY, {1000: 2.0, 100_000: 4.0}, 10_000, 3.0, "interpolated: capacity 1,000 to 100,000"),
        (CAPACITY, {1000: 2.0}, 10_000, 2.0, "extrapolated: capacity above 1,000"),
    ],
)
def test_lines_of_the_batch_size_and_of_the_logarithm_of_the_capacity(
    axis: Axis, points: dict[int, float], at: int, expected: float, note: str
) -> None:
    found = along(axis, {size: of(value) for size, value in points.items()}, at)
    assert found.value_us == pytest.approx(expected)
    assert found.note == note


def test_both_sizes_are_interpolated_and_an_extrapolation_is_named_first() -> None:
    points = {(b, c): of(b * 1.0 + c * 0.001) for b in (32, 64) for c in (1000, 100_000)}
    assert interpolate(points, 64, 1000) == points[64, 1000]
    both = interpolate(points, 128, 10_000)
    assert both.note == "extrapolated: batch above 64; interpolated: capacity 1,000 to 100,000"
    assert points[64, 1000].value_us < both.value_us
