"""The table and the picture of a sweep."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from composer.report import ascii_table
from composer.spec_overrides import short_text, toml_text
from composer.sweep.space import Choices, Parameter
from composer.sweep.spec import SweepSpec
from composer.sweep.study import TrialRow
from composer.sweep.trial import compose_options
from pearl.atomic_file import replace_file, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_MOST_ROWS = 20
_MOST_PANELS = 8
_COLUMNS = 3
_TWO_DECADES = 100
_COLORS = {"complete": "#4477aa", "pruned": "#bbbbbb"}


def ranked(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Complete trials first, the best of them at the top; then pruned, failed and interrupted ones."""
    order = ("complete", "pruned", "failed", "interrupted")
    return sorted(rows, key=lambda row: (order.index(row.state), -_real(row.objective), row.number))


def best_command(spec: SweepSpec, best: TrialRow) -> str:
    """The command that composes the best trial's program again, as the sweep did."""
    return shlex.join(["pearl", "compose", str(spec.path), *compose_options(spec, best.values)])


def result_table(spec: SweepSpec, rows: Sequence[TrialRow]) -> Table:
    """The best trials, and all that have no score if there is room."""
    names = [one.name for one in spec.space]
    headings = ("trial", spec.objective, "scores", *(name.partition(".")[2] for name in names), "")
    title = f"{len(rows)} trials of {spec.path.name}, best first"
    table = ascii_table(title, headings, right=("trial", spec.objective))
    for row in ranked(rows)[:_MOST_ROWS]:
        scores = ", ".join(f"{score:.4g}" for score in row.scores)
        values = [short_text(row.values[name]) if name in row.values else "" for name in names]
        note = "" if row.state == "complete" else f"{row.state}{f': {row.reason:.60}' if row.reason else ''}"
        objective = "" if row.objective is None else f"{row.objective:,.4g}"
        table.add_row(*map(Text, (str(row.number), objective, scores, *values, note)))
    if len(rows) > _MOST_ROWS:
        table.caption = f"{len(rows) - _MOST_ROWS} more are in sweep.csv"
    return table


def write_table(spec: SweepSpec, rows: Sequence[TrialRow], path: Path) -> None:
    """All trials as CSV, in the order in which they began; settings as TOML writes them."""
    names = [one.name for one in spec.space]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    scores = [f"seed_{seed}" for seed in spec.seeds]
    writer.writerow(["trial", "state", "objective", *scores, *names, "seconds", "folder", "reason"])
    for row in rows:
        writer.writerow(
            [
                *(row.number, row.state, "" if row.objective is None else repr(row.objective)),
                *(repr(row.scores[n]) if n < len(row.scores) else "" for n in range(len(scores))),
                *(toml_text(row.values[name]) if name in row.values else "" for name in names),
                *("" if row.seconds is None else f"{row.seconds:.1f}", row.folder, row.reason),
            ]
        )
    write_text(path, file.getvalue())


def draw(spec: SweepSpec, rows: Sequence[TrialRow], path: Path) -> None:
    """The objective over the trials, and against each setting, as PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = spec.space[: _MOST_PANELS - 1]
    columns = min(_COLUMNS, 1 + len(shown))
    lines = math.ceil((1 + len(shown)) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    figure.suptitle(f"{spec.path.stem}: {spec.objective} of {spec.score} scores over {len(spec.seeds)} seeds")
    _draw_history(panels[0], rows)
    for panel, one in zip(panels[1:], shown, strict=False):
        _draw_setting(panel, one, rows)
    for panel in panels[1 + len(shown) :]:
        panel.set_axis_off()
    with replace_file(path) as stream:
        figure.savefig(stream, format="png")


def _draw_history(axes: Axes, rows: Sequence[TrialRow]) -> None:
    from matplotlib.ticker import MaxNLocator

    for state, color in _COLORS.items():
        found = [row for row in rows if row.state == state and row.objective is not None]
        if found:
            axes.scatter([row.number for row in found], [_real(row.objective) for row in found], 18, color, label=state)
    done = [row for row in rows if row.state == "complete"]
    if done:
        best = np.maximum.accumulate([_real(row.objective) for row in done])
        axes.step([row.number for row in done], best, where="post", color="#228833", label="best so far")
    for number, row in enumerate(row for row in rows if row.state == "failed"):
        axes.axvline(row.number, color="#ee6677", lw=0.8, ls=":", label=None if number else "failed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel("objective")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _draw_setting(axes: Axes, one: Parameter, rows: Sequence[TrialRow]) -> None:
    from matplotlib.ticker import NullFormatter

    found = [row for row in rows if row.state in _COLORS and row.objective is not None and one.name in row.values]
    values: list[Any] = [row.values[one.name] for row in found]
    if isinstance(one, Choices):
        order = [toml_text(value) for value in one.values]
        axes.set_xticks(range(len(order)), order)
        axes.set_xlim(-0.5, len(order) - 0.5)
        values = [order.index(toml_text(value)) for value in values]
    else:
        if one.log:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            if one.high < _TWO_DECADES * one.low:  # powers of ten would be one label, or none
                ticks = [float(f"{value:.2g}") for value in np.geomspace(one.low, one.high, 4)]
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlim(one.low, one.high)
    axes.scatter(
        values, [_real(row.objective) for row in found], 18, [_COLORS[row.state] for row in found], clip_on=False
    )
    axes.set_xlabel(one.name)


def _real(value: float | None) -> float:
    return -math.inf if value is None else value
