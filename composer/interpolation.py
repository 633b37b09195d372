"""Times for sizes that were not measured, from measurements of other sizes: monotone, and each with a note.

A time grows linearly with the batch size, and with the logarithm of the capacity. Straight lines between neighbours
follow that, never leave the range of their two measurements, and thus rise wherever the measurements do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from composer.measurement import Measurement


@dataclass(frozen=True)
class Axis:
    """A size: its name, the scale on which times are straight lines, and whether a larger one takes as much longer."""

    name: str
    scale: Callable[[float], float]
    proportional: bool


BATCH_SIZE = Axis("batch", float, proportional=True)
CAPACITY = Axis("capacity", math.log, proportional=False)


def interpolate(points: Mapping[tuple[int, int], Measurement], batch_size: int, capacity: int) -> Measurement:
    """The time at `batch_size` and `capacity` from those measured at `points`, pairs of both; its note says how.

    Each measured capacity is first interpolated to the batch size, then these times to the capacity. Outside of the
    measured sizes the note begins with "extrapolated:". Above, the line of the last two measurements goes on, and after
    a single one the time is proportional to the batch size; below, the time of the smallest size is taken.
    """
    by_capacity: dict[int, dict[int, Measurement]] = {}
    for (batch, slots), measurement in points.items():
        by_capacity.setdefault(slots, {})[batch] = measurement
    at_batch = {slots: along(BATCH_SIZE, found, batch_size) for slots, found in by_capacity.items()}
    return along(CAPACITY, at_batch, capacity)


def along(axis: Axis, points: Mapping[int, Measurement], at: int) -> Measurement:
    """The time at the size `at` from those measured at other sizes of one axis."""
    if at in points:
        return points[at]
    below = sorted(size for size in points if size < at)
    above = sorted(size for size in points if size > at)
    if not below:
        return _noted(f"extrapolated: {axis.name} below {above[0]:,}", points[above[0]])
    if not above:
        note = f"extrapolated: {axis.name} above {below[-1]:,}"
        last = points[below[-1]]
        if len(below) == 1:
            factor = at / below[0] if axis.proportional else 1.0
            return _made(note, (last,), lambda time: time(last) * factor)
        first, share = points[below[-2]], _share(axis, below[-2], below[-1], at)
        return _made(note, (last, first), lambda time: time(last) + max(0.0, time(last) - time(first)) * (share - 1.0))
    first, last, share = points[below[-1]], points[above[0]], _share(axis, below[-1], above[0], at)
    note = f"interpolated: {axis.name} {below[-1]:,} to {above[0]:,}"
    return _made(note, (first, last), lambda time: time(first) + (time(last) - time(first)) * share)


def _share(axis: Axis, first: int, last: int, at: int) -> float:
    return (axis.scale(at) - axis.scale(first)) / (axis.scale(last) - axis.scale(first))


def _made(
    note: str, of: tuple[Measurement, ...], value: Callable[[Callable[[Measurement], float]], float]
) -> Measurement:
    """A measurement whose three percentiles are `value` of those of the measurements `of`."""
    low, median, high = sorted(value(time) for time in (_p20, _p50, _p80))
    made = Measurement(median, low, high, min(m.n for m in of), of[0].source)
    return _noted(note, made, *of)


def _noted(note: str, measurement: Measurement, *of: Measurement) -> Measurement:
    parts = dict.fromkeys(part for m in of or (measurement,) for part in m.note.split("; ") if part)
    ordered = sorted({**parts, note: None})  # "extrapolated" comes first
    return replace(measurement, note="; ".join(ordered))


def _p20(measurement: Measurement) -> float:
    return measurement.p20_us


def _p50(measurement: Measurement) -> float:
    return measurement.value_us


def _p80(measurement: Measurement) -> float:
    return measurement.p80_us
