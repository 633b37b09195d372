"""The part of a report on a run: its key numbers, its curves, and its iterations against the prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from composer.html_report.record import RunRecord
from composer.html_report.svg import Series, bar, chart
from composer.html_report.trace import Trace
from composer.predicted_parts import predicted_us
from composer.report import short_number
from pearl.runtime.learning_curve import moving_mean
from pearl.runtime.scores import best_text, evaluated_in_text, last_text, number
from pearl.runtime.telemetry import ALL_PARTS

if TYPE_CHECKING:
    import pandas as pd

_EVALUATIONS = {  # kinds of evaluations.csv in words
    "progress": "greedy evaluation",
    "solved check": "full evaluation",
    "best": "best weights, new episodes",
    "last": "last weights, new episodes",
    "last and best": "last and best weights, new episodes",
}
_MOST_QUEUES = 12
_STYLES = 7  # of lines, in the style sheet
_CLOSE = 0.1  # a measurement within this share of its prediction agrees with it


@dataclass(frozen=True)
class Figure:
    """A drawing and what it shows."""

    caption: str
    drawing: Markup


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """The facts of the summary in words, those that are known."""
    summary = record.summary
    found = [(name, text_of(summary.get(key))) for name, key in (("Stopped", "stopped"), ("Seed", "seed"))]
    found.append(("Evaluated in", text_of(evaluated_in_text(summary))))
    for name, key, form in (
        ("Environment steps", "env_steps", "{:,.0f}"),
        ("Gradient steps", "gradient_steps", "{:,.0f}"),
        ("Training episodes", "episodes", "{:,.0f}"),
        ("Replay ratio", "replay_ratio", "{:,.2f}"),
        ("Wall-clock time", "wall_s", "{:,.1f} s"),
        ("Actor restarts", "actor_restarts", "{:,.0f}"),
    ):
        value = number(summary, key)
        found.append((name, form.format(value) if math.isfinite(value) else ""))
    if summary:
        found += [("Last weights", last_text(summary)), ("Best weights", best_text(summary))]
    found.append(("Composed from", text_of(summary.get("composed_from"))))
    return [(name, text) for name, text in found if text]


def key_numbers(record: RunRecord) -> list[tuple[str, str, str]]:
    """The numbers that a reader looks for first: name, value, remark."""
    found = []
    for source, values, how in (
        ("EPS, measured", record.summary, "while a batch was under way"),
        ("EPS, benchmark", record.bench, "bench.json, free-running"),
    ):
        if math.isfinite(eps := number(values, "measured_eps")):
            found.append((source, f"{eps:,.0f}", how))
    predicted = number(record.summary or record.bench, "predicted_eps")
    if record.composition is not None and not predicted > 0:
        predicted = record.composition.placement.eps
    if math.isfinite(predicted) and predicted > 0:
        measured = number(record.summary, "measured_eps")
        share = f"measured is {measured / predicted:.2f} of it" if math.isfinite(measured) else "by the composer"
        found.append(("EPS, predicted", f"{predicted:,.0f}", share))
    for name, key in (("Return, last weights", "last"), ("Return, best weights", "best")):
        score = record.summary.get(key)
        if isinstance(score, dict) and math.isfinite(mean := number(score, "mean")):
            found.append((name, f"{mean:,.4g}", f"± {number(score, 'std'):,.3g}, greedy, new episodes"))
    return found


def text_of(value: object) -> str:
    """A text or number of a JSON file, of at most 400 characters; empty for anything else."""
    return str(value)[:400] if isinstance(value, str | int | float) else ""


# --- Curves ---------------------------------------------------------------------------------------------------------


def learning_curves(record: RunRecord) -> list[Figure]:
    """Returns over steps and over time, and EPS over time."""
    figures = []
    for column, axis in (("env_steps", "environment steps"), ("wall_s", "seconds")):
        series = [*_training_returns(record, column), *_greedy_returns(record, column)]
        drawn = chart(f"Returns over {axis}", axis, "return", series)
        if drawn is not None:
            figures.append(Figure(f"Return over {axis}", drawn))
    rates = [Series("EPS", *_points(record.progress, "wall_s", "eps"))]
    if (drawn := chart("EPS over time", "seconds", "EPS", rates, from_zero=True)) is not None:
        figures.append(Figure("EPS over seconds, waiting included", drawn))
    return figures


def _training_returns(record: RunRecord, column: str) -> list[Series]:
    table = record.episodes
    if table is None or table.empty:
        return [Series("training return", *_points(record.progress, column, "training_return"))]
    table = table[(table.abs() <= 1e300).all(axis=1)].sort_values(column)
    x, y, counts = (table[name].to_numpy(np.float64) for name in (column, "return", "episodes"))
    counts = np.maximum(counts, 1.0)
    window = min(100, max(20, int(min(counts.sum(), 1e6)) // 20))
    mean = moving_mean(y, counts, window) if len(y) else y
    dots = Series("training episode", x, y, "dots", style=0)
    return [dots, Series(f"mean of {window} episodes", x, mean, style=1)]


def _greedy_returns(record: RunRecord, column: str) -> Iterator[Series]:
    table = record.evaluations
    if table is None:
        return
    for style, (kind, name) in enumerate(_EVALUATIONS.items()):
        shown = table[table["kind"] == kind]
        if kind not in ("progress", "solved check"):
            shown = shown.tail(1)
        x, y = (shown[key].to_numpy(np.float64) for key in (column, "mean_return"))
        yield Series(name, x, y, "marks", style=style + 2)


def _points(table: pd.DataFrame | None, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    if table is None or x not in table or y not in table:
        return np.empty(0), np.empty(0)
    found = table[[x, y]].dropna().sort_values(x, kind="stable")
    return found[x].to_numpy(np.float64), found[y].to_numpy(np.float64)


def queue_levels(record: RunRecord) -> list[Figure]:
    """How full the queues and how busy the primitives are: over the run (progress.csv), and queues over the trace."""
    figures = []
    columns = [] if record.progress is None else list(map(str, record.progress.columns))
    busy = [
        Series(column.partition("/")[2], *_points(record.progress, "wall_s", column), style=style % _STYLES)
        for style, column in enumerate(name for name in columns if name.startswith("busy/"))
    ]
    if (drawn := chart("Busy share of each primitive", "seconds", "share", busy[:_STYLES], from_zero=True)) is not None:
        figures.append(Figure("Busy share of each primitive over seconds", drawn))
    for column in [name for name in columns if name.startswith("queue/")][:_MOST_QUEUES]:
        name = column.partition("/")[2]
        name = name.upper() if len(name) == 3 else name  # DCQ, LAQ, ...
        figures += _level(name, "share filled over seconds", "seconds", *_points(record.progress, "wall_s", column))
    trace = record.trace or Trace(())
    for name, (times, levels) in list(trace.counters.items())[:_MOST_QUEUES]:
        times_ms = (np.array(times) - min(times)) / 1e3
        order = np.argsort(times_ms, kind="stable")
        figures += _level(
            name, "fill level over traced milliseconds", "milliseconds", times_ms[order], np.array(levels)[order]
        )
    return figures


def _level(name: str, what: str, axis: str, x: np.ndarray, y: np.ndarray) -> list[Figure]:
    drawn = chart(f"{name}: {what}", axis, "level", [Series(name, x, y, "steps")], from_zero=True)
    return [] if drawn is None else [Figure(f"{name}: {what}", drawn)]


# --- Prediction against measurement ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A term of the iteration; empty texts where a value is missing."""

    name: str
    predicted: str
    predicted_bar: Markup
    measured: str
    measured_bar: Markup
    verdict: str
    spread: str


@dataclass(frozen=True)
class Comparison:
    """The terms of an iteration as predicted and as measured; `source` says where they were measured."""

    source: str
    terms: tuple[Term, ...]


def comparisons(record: RunRecord) -> list[Comparison]:
    """One comparison for each file that has measured an iteration; else the prediction alone."""
    composed = {} if record.composition is None else predicted_us(record.composition.placement)
    stated = (values.get("iteration") for values in (record.summary, record.bench))
    said = (_numbers(iteration.get("predicted_us")) for iteration in stated if isinstance(iteration, dict))
    composed = next((numbers for numbers in said if numbers), composed)
    found = []
    for source, values in (
        ("in the run (summary.json)", record.summary),
        ("in a benchmark, free-running (bench.json)", record.bench),
    ):
        iteration = values.get("iteration")
        if isinstance(iteration, dict):
            predicted = _numbers(iteration.get("predicted_us")) or composed
            measured, spread = _numbers(iteration.get("measured_us")), iteration.get("spread_us")
            if terms := _terms(predicted, measured, spread if isinstance(spread, dict) else {}):
                found.append(Comparison(source, terms))
    if not found and composed:
        found.append(Comparison("", _terms(composed, {}, {})))
    return found


def _numbers(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    found = {name: number(values, name) for name in ALL_PARTS}
    return {name: value for name, value in found.items() if 0 <= value <= 1e300}


def _terms(
    predicted: Mapping[str, float], measured: Mapping[str, float], spread: Mapping[str, object]
) -> tuple[Term, ...]:
    longest = max([*predicted.values(), *measured.values()], default=0.0)

    def shown(values: Mapping[str, float], name: str, class_: str) -> tuple[str, Markup]:
        value = values.get(name)
        return ("", Markup()) if value is None else (short_number(value), bar(value / (longest or 1.0), class_))

    return tuple(
        Term(
            name,
            *shown(predicted, name, "predicted"),
            *shown(measured, name, "measured"),
            _verdict(predicted.get(name), measured.get(name)),
            _spread(spread.get(name)),
        )
        for name in ALL_PARTS
        if name in predicted or name in measured
    )


def _spread(found: object) -> str:
    """The 20th and the 80th percentile in words; empty where these are not two numbers."""
    if not isinstance(found, list) or len(found) != 2:
        return ""
    low, high = (number({"us": value}, "us") for value in found)
    return f"{short_number(low)} to {short_number(high)}" if 0 <= low <= high <= 1e300 else ""


def _verdict(predicted: float | None, measured: float | None) -> str:
    if predicted is None:
        return "not predicted"
    if measured is None:
        return "not measured"
    if not predicted:
        return "as predicted" if not measured else "predicted as none"
    ratio = measured / predicted
    if abs(ratio - 1) <= _CLOSE:
        return f"{ratio:.2f}x, agrees"
    shown = f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"
    return f"{shown}x, {'longer' if ratio > 1 else 'shorter'}"


def prediction_differs(record: RunRecord) -> str:
    """A note where the composition is not that of the program that ran; else an empty text."""
    said: Any = number(record.summary or record.bench, "predicted_eps")
    if record.composition is None or not said > 0:
        return ""
    placement = record.composition.placement
    if any(abs(eps - said) <= 0.1 + 1e-6 * eps for eps in (placement.eps, placement.free_eps)):
        return ""
    return (
        f"The run's program predicted {said:,.0f} EPS, its composition {placement.eps:,.0f}: "
        "they belong to different compositions."
    )
