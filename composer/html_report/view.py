"""The view of any composition for a report; `composition_view` and `rollout_view` fill it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from composer.html_report.svg import bar
from composer.html_report.timeline import Work
from composer.matrix import UnavailableDevice
from composer.measurement import Measurement
from composer.report import short_number

LEVELS = 7  # shades of the heat map
SAME = "as above"  # a cell that does not depend on the Learner's implementation


@dataclass(frozen=True)
class Value:
    """A latency of a cell: its shade from 0 (the fastest of its kind) to LEVELS - 1, and how it compares with that."""

    name: str
    us: str
    level: int
    against: str
    source: str
    hover: str

    @classmethod
    def of(cls, name: str, measurement: Measurement, fastest: float, slowest: float) -> Value:
        """Compared with the fastest and the slowest of its kind, in microseconds."""
        us = measurement.value_us
        level, against = 0, "fastest"
        if us > fastest > 0:
            level = min(LEVELS - 1, max(1, round((LEVELS - 1) * math.log(us / fastest) / math.log(slowest / fastest))))
            against = f"{us / fastest:,.3g}x the fastest"
        low, high = short_number(measurement.p20_us), short_number(measurement.p80_us)
        if measurement.n:
            source = f"{measurement.source}, {low} to {high}"
            hover = (
                f"{measurement.source}: p20 {low}, p50 {short_number(us)}, p80 {high} µs of {measurement.n:,} samples"
            )
        else:
            source, hover = measurement.source, f"{measurement.source}, without samples: no spread"
        return cls(name, short_number(us), level, against, source, hover)


@dataclass(frozen=True)
class HeatCell:
    """A cell of the heat map; `reason` says why there is none."""

    column: str
    parameters: str
    values: tuple[Value, ...]
    chosen: bool
    reason: str = ""


@dataclass(frozen=True)
class HeatRow:
    """A device, or another implementation of the Learner on it."""

    device: str
    cells: tuple[HeatCell, ...]


@dataclass(frozen=True)
class Pair:
    """A placement with its cost; `eps_per_watt` is empty where the watts are not known."""

    name: str
    chosen: bool
    t_itr: str
    eps: str
    eps_bar: Markup
    eps_per_watt: str
    eps_per_watt_bar: Markup
    watts: str
    reason: str


@dataclass(frozen=True)
class Stage:
    """A part of the iteration that runs in parallel with the others; the slowest one gives the time of an iteration."""

    name: str
    us: str
    bar: Markup
    slowest: bool
    terms: tuple[tuple[str, str], ...]

    @classmethod
    def all_of(cls, found: Sequence[tuple[str, dict[str, float]]]) -> list[Stage]:
        """Stages with their terms in microseconds; shown are those above zero, the largest first."""
        totals = [sum(terms.values()) for _, terms in found]
        longest = max(totals)
        return [
            cls(
                name,
                short_number(total),
                bar(total / longest if longest else 0.0, "eps"),
                total == longest,
                tuple((term, short_number(us)) for term, us in sorted(terms.items(), key=lambda i: -i[1]) if us > 0),
            )
            for (name, terms), total in zip(found, totals, strict=True)
        ]


@dataclass(frozen=True)
class View:
    """All of it. `placed` are the primitives with their devices; `storages` are devices, traffic and why."""

    how: str
    host: str
    placed: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    iteration: str
    stages: list[Stage]
    schedule: list[Work]
    drawn: str  # what the drawn schedule is, in words
    columns: tuple[str, ...]
    heat_rows: list[HeatRow]
    assumption: str
    pair_heading: str
    pairs: list[Pair]
    more_pairs: int
    storages: list[tuple[str, str, str]]
    unavailable: tuple[UnavailableDevice, ...]
    left_out: list[str]

    def roles(self, device: str) -> tuple[str, ...]:
        """The primitives that are placed on a device."""
        return tuple(name for name, place in self.placed if place == device)
