"""What a report shows of a composition: the matrix as a heat map, every placement, the stages of an iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from composer.html_report.svg import bar
from composer.matrix import COLUMNS, AssignmentMatrix, Cell, LearnerCell, Measurement, MissingCell, PairCell
from composer.placement import Candidate, Placement
from composer.report import short_number
from pearl.errors import ConfigurationError

LEVELS = 7  # shades of the heat map
SAME = "as above"  # a cell that does not depend on the Learner's implementation
_MOST_PAIRS = 40


@dataclass(frozen=True)
class Value:
    """A latency of a cell: its shade from 0 (the fastest of its kind) to LEVELS - 1, and how it compares with that."""

    name: str
    us: str
    level: int
    against: str
    source: str
    hover: str


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


def heat_rows(matrix: AssignmentMatrix, placement: Placement) -> list[HeatRow]:
    """The rows of the matrix; implementations of the Learner that are not the fastest follow in rows of their own."""
    fastest: dict[str, float] = {}
    slowest: dict[str, float] = {}
    for name, measurement in _all_measurements(matrix):
        us = measurement.value_us
        fastest[name], slowest[name] = min(fastest.get(name, us), us), max(slowest.get(name, us), us)

    def cell_of(device: str, column: str, cell: Cell) -> HeatCell:
        if isinstance(cell, MissingCell):
            return HeatCell(column, "", (), chosen=False, reason=cell.reason)
        values = tuple(_value(name, m, fastest[name], slowest[name]) for name, m in cell.measurements())
        return HeatCell(column, cell.parameters, values, _is_chosen(placement, device, column, cell))

    rows = []
    for row in matrix.rows:
        rows.append(HeatRow(row.device, tuple(cell_of(row.device, *found) for found in row.cells())))
        for other in row.others:
            cells = tuple(cell_of(row.device, *found) for found in other.cells())
            alone = other.learner
            name = f"{row.device} ({alone.implementation if isinstance(alone, LearnerCell) else 'another Learner'})"
            same, storage = (HeatCell(column, "", (), chosen=False, reason=SAME) for column in (COLUMNS[0], COLUMNS[3]))
            rows.append(HeatRow(name, (same, *cells, storage)))
    return rows


def _all_measurements(matrix: AssignmentMatrix) -> Iterator[tuple[str, Measurement]]:
    for row in matrix.rows:
        for _, cell in (*row.cells(), *(found for other in row.others for found in other.cells())):
            yield from cell.measurements()


def _is_chosen(placement: Placement, device: str, column: str, cell: Cell) -> bool:
    if column == "RM only":
        return placement.setting == 1 and device == placement.replay_manager
    if column == "Data Storage":
        return device == placement.storage
    chosen_column = "RM & Learner" if placement.setting == 2 else "Learner only"
    learner = cell.learner if isinstance(cell, PairCell) else cell
    implementation = learner.implementation if isinstance(learner, LearnerCell) else ""
    return (device, column, implementation) == (placement.learner, chosen_column, placement.implementation)


def _value(name: str, measurement: Measurement, fastest: float, slowest: float) -> Value:
    us = measurement.value_us
    level, against = 0, "fastest"
    if us > fastest > 0:
        level = min(LEVELS - 1, max(1, round((LEVELS - 1) * math.log(us / fastest) / math.log(slowest / fastest))))
        against = f"{us / fastest:,.3g}x the fastest"
    low, high = short_number(measurement.p20_us), short_number(measurement.p80_us)
    if measurement.n:
        source = f"{measurement.source}, {low} to {high}"
        hover = f"{measurement.source}: p20 {low}, p50 {short_number(us)}, p80 {high} µs of {measurement.n:,} samples"
    else:
        source, hover = measurement.source, f"{measurement.source}, without samples: no spread"
    return Value(name, short_number(us), level, against, source, hover)


@dataclass(frozen=True)
class Pair:
    """A placement with its cost; `eps_per_watt` is empty where the watts are not known."""

    replay_manager: str
    learner: str
    setting: int
    chosen: bool
    t_itr: str
    eps: str
    eps_bar: Markup
    eps_per_watt: str
    eps_per_watt_bar: Markup
    watts: str
    reason: str


def pairs(placement: Placement) -> tuple[list[Pair], int]:
    """The best placements and the chosen one, and how many are left out."""
    shown = [c for n, c in enumerate(placement.candidates) if n < _MOST_PAIRS or c is placement.chosen]
    most_eps = max(c.eps for c in shown)
    most_per_watt = max((c.eps / c.watts for c in shown if c.watts), default=1.0)
    return [_pair(placement, c, most_eps, most_per_watt) for c in shown], len(placement.candidates) - len(shown)


def _pair(placement: Placement, candidate: Candidate, most_eps: float, most_per_watt: float) -> Pair:
    chosen = candidate is placement.chosen
    try:
        reason = "" if chosen else placement.why_not(candidate)
    except ConfigurationError as error:  # no watts, where power counts
        reason = str(error)
    per_watt = candidate.eps / candidate.watts if candidate.watts else None
    return Pair(
        replay_manager=candidate.replay.device,
        learner=f"{candidate.learner.device} ({candidate.learner.implementation})",
        setting=candidate.setting,
        chosen=chosen,
        t_itr=short_number(candidate.t_itr_us),
        eps=f"{candidate.eps:,.0f}",
        eps_bar=bar(candidate.eps / most_eps, "eps"),
        eps_per_watt="" if per_watt is None else short_number(per_watt),
        eps_per_watt_bar=Markup() if per_watt is None else bar(per_watt / most_per_watt, "per-watt"),
        watts="" if candidate.watts is None else f"{candidate.watts:,.0f}",
        reason=reason,
    )


@dataclass(frozen=True)
class Stage:
    """A part of the iteration that runs beside the others; the slowest one gives the time of an iteration."""

    name: str
    us: str
    bar: Markup
    slowest: bool
    terms: tuple[tuple[str, str], ...]


def stages(placement: Placement) -> list[Stage]:
    """The stages of a predicted iteration with their terms above zero, the largest first."""
    found = placement.terms.stages()
    if placement.terms.delay:
        names = [
            f"a batch through all devices, {placement.terms.delay + 1} under way",
            "Learner",
            "Replay Manager",
            "host",
        ]
    else:
        names = ["with training", "with insertion"]
    names += [f"stage {number + 1}" for number in range(len(names), len(found))]
    totals = [sum(stage.values()) for stage in found]
    longest = max(totals)
    return [
        Stage(
            name,
            short_number(total),
            bar(total / longest if longest else 0.0, "eps"),
            total == longest,
            tuple((name, short_number(us)) for name, us in sorted(stage.items(), key=lambda item: -item[1]) if us > 0),
        )
        for name, stage, total in zip(names, found, totals, strict=False)
    ]
