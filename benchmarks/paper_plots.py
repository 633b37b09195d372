"""The pictures of docs/paper.md, as SVG files whose bytes depend on the numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PANEL = (3.1, 2.5)  # inches
SETTINGS = {"svg.hashsalt": "pearl", "svg.fonttype": "none", "font.size": 8, "legend.fontsize": 7}


@dataclass(frozen=True)
class Line:
    """A line, with a band from `low` to `high` if these are given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines; `ticks` name x = 0, 1, 2, ..."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    logarithmic: bool = True
    ticks: Sequence[str] = ()


@dataclass(frozen=True)
class Grid:
    """A value for each Replay Manager (row) and Learner (column); NaN where a choice cannot run."""

    title: str
    devices: Sequence[str]
    values: np.ndarray
    texts: Sequence[Sequence[str]]


@contextmanager
def _figure(path: Path, count: int, columns: int, panel: tuple[float, float]) -> Iterator[Sequence[Any]]:
    """Axes of a figure that is saved to `path` afterwards, with one legend of all labels below them."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = -(-count // columns)
    with matplotlib.rc_context(SETTINGS):
        size = (panel[0] * columns, panel[1] * rows)
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        flat = list(axes.flat)
        yield flat[:count]
        for unused in flat[count:]:
            unused.axis("off")
        handles = {label: one for ax in flat for one, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, 2 * columns))
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


def draw_lines(path: Path, panels: Sequence[Panel], columns: int) -> None:
    """Panels with lines; a label has the same color in all."""
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    with _figure(path, len(panels), columns, PANEL) as axes:
        for ax, panel in zip(axes, panels, strict=True):
            for line in panel.lines:
                color = f"C{labels.index(line.label)}"
                ax.plot(line.x, line.y, marker="." if len(line.x) < 10 else "", label=line.label, color=color)
                if line.low is not None and line.high is not None:
                    ax.fill_between(line.x, line.low, line.high, alpha=0.2, color=color)
            if panel.logarithmic:
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
            if panel.ticks:
                ax.set_xticks(range(len(panel.ticks)), panel.ticks)
            ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            ax.grid(alpha=0.3)


def draw_grids(path: Path, grids: Sequence[Grid], columns: int) -> None:
    """Grids whose colors follow the values, each with a scale of its own."""
    with _figure(path, len(grids), columns, (2.5, 2.0)) as axes:
        for ax, grid in zip(axes, grids, strict=True):
            ax.imshow(grid.values, cmap="Blues", vmin=0, vmax=1.6 * np.nanmax(grid.values))
            ax.set_xticks(range(len(grid.devices)), grid.devices)
            ax.set_yticks(range(len(grid.devices)), grid.devices)
            ax.set(title=grid.title, xlabel="Learner", ylabel="RM")
            for row, texts in enumerate(grid.texts):
                for column, text in enumerate(texts):
                    ax.text(column, row, text, ha="center", va="center", fontsize=7)


def draw_bars(
    path: Path, groups: Mapping[str, Mapping[str, Sequence[float]]], ticks: Mapping[str, Sequence[str]], y_label: str
) -> None:
    """A panel for each group: bars of each series at each tick, on a logarithmic scale; NaN leaves a gap."""
    with _figure(path, len(groups), min(len(groups), 2), (4.6, 2.7)) as axes:
        for ax, (title, series) in zip(axes, groups.items(), strict=True):
            width = 0.85 / len(series)
            for place, (label, values) in enumerate(series.items()):
                ax.bar(np.arange(len(values)) + (place + 0.5) * width - 0.425, values, width, label=label)
            ax.set_xticks(range(len(ticks[title])), ticks[title])
            ax.set_yscale("log")
            ax.set(title=title, xlabel="batch size", ylabel=y_label)
            ax.grid(alpha=0.3, axis="y")
