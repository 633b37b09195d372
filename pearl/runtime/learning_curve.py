"""The learning curve of a run as a picture: training episodes and greedy evaluations over steps and time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pearl.atomic_file import replace_file
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LARGEST_PLOT = 20_000  # dots; more would be one blot
_MOST_BINS = 100_000  # rows of episodes in memory at once, each the mean of as many as it takes
_PIECE_ROWS = 50_000
_EVALUATION_COLUMNS = ("env_steps", "wall_s", "weights_step", "mean_return")


class _Marks(NamedTuple):
    """How one kind of evaluation is drawn; of `newest`, only the last of the run."""

    kind: str
    label: str
    marker: str
    size: float
    color: str
    newest: bool


_MARKS = (
    _Marks("progress", "greedy evaluation", "D", 4.5, "#ee6677", newest=False),
    _Marks("solved check", "full evaluation", "s", 6.0, "#ccbb44", newest=False),
    _Marks("best", "best weights, new episodes", "*", 13.0, "#228833", newest=True),
    _Marks("last", "last weights, new episodes", "X", 9.0, "#aa3377", newest=True),
    _Marks("last and best", "last weights, also the best, new episodes", "*", 13.0, "#aa3377", newest=True),
)


def plot_learning_curve(directory: Path, title: str = "Learning curve") -> Path:
    """Draw the curve of the run in `directory`, as `draw_learning_curve` does, into its `learning_curve.png`."""
    path = Path(directory) / "learning_curve.png"
    figure = draw_learning_curve(directory, title)
    with replace_file(path) as stream:
        figure.savefig(stream, format="png")
    return path


def draw_learning_curve(directory: Path, title: str = "Learning curve") -> Figure:
    """Episode returns against environment steps and wall-clock time.

    Reads `episodes.csv` and, where present, `evaluations.csv`, whose kinds are marked apart: each where its weights
    were. Needs no display. Raises ConfigurationError where there is no episode to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    directory = Path(directory)
    episodes = read_episodes(directory / "episodes.csv")
    if episodes is None or episodes.empty:
        raise ConfigurationError(
            f"{directory} holds no finished episode to draw (episodes.csv). Train for longer, or check the path."
        )
    evaluations = read_evaluations(directory / "evaluations.csv")
    figure = Figure(figsize=(11, 4.6), dpi=150)
    figure.set_layout_engine("constrained", wspace=0.05)
    FigureCanvasAgg(figure)
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    longest_s = float(episodes["wall_s"].max())
    scale, unit = (3600.0, "h") if longest_s > 7200 else (60.0, "min") if longest_s > 300 else (1.0, "s")
    _draw_returns(by_steps, "env_steps", 1.0, episodes, evaluations)
    _draw_returns(by_time, "wall_s", scale, episodes, evaluations)
    by_steps.set_xlabel("environment steps")
    by_steps.set_ylabel("undiscounted return per episode")
    by_time.set_xlabel(f"wall-clock time ({unit})")
    by_steps.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles, labels = by_steps.get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
    return figure


def read_evaluations(path: Path) -> pd.DataFrame | None:
    """Kind and mean return of each evaluation, with the environment steps and the time at which its weights were."""
    table = _read_csv(path, _EVALUATION_COLUMNS, "kind")
    if table is None:
        return None
    # The best weights play at the end; their time is that of the evaluation that selected them, if it is there.
    on_the_way = table[table["kind"] == "progress"].drop_duplicates("weights_step", keep="last")
    seen_at = on_the_way.set_index("weights_step")["wall_s"]
    earlier = table["kind"] == "best"
    table.loc[earlier, "wall_s"] = table["weights_step"].map(seen_at).fillna(table["wall_s"])[earlier]
    return table.assign(env_steps=table["weights_step"])


def read_episodes(path: Path) -> pd.DataFrame | None:
    """Steps, seconds, mean return and number of the episodes of each row; a long file in pieces, as means over rows."""
    import pandas as pd

    columns = ("env_steps", "wall_s", "return", "episodes")
    if not path.exists():
        return None
    try:
        size = -(-_count_lines(path) // _MOST_BINS) or 1  # rows of a bin
        pieces = []
        for piece in pd.read_csv(path, on_bad_lines="skip", chunksize=size * max(1, _PIECE_ROWS // size)):
            found = piece[list(columns)].apply(pd.to_numeric, errors="coerce").dropna()
            if size > 1:
                found["return"] *= found["episodes"]
                bins = found.groupby(found.index // size)
                found = bins.agg({"env_steps": "last", "wall_s": "last", "return": "sum", "episodes": "sum"})
                found["return"] /= found["episodes"]
            pieces.append(found)
    except (ValueError, KeyError, OSError) as error:
        raise _not_a_table(path, columns, error) from error
    if not pieces:
        return None
    table: pd.DataFrame = pd.concat(pieces, ignore_index=True)
    return table.sort_values("env_steps", kind="stable")


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))


def _read_csv(path: Path, columns: Sequence[str], text: str | None = None) -> pd.DataFrame | None:
    """The rows whose `columns` are all numbers, and the column `text` as it is."""
    import pandas as pd

    if not path.exists():
        return None
    try:
        read = pd.read_csv(path, on_bad_lines="skip")
        table: pd.DataFrame = read[list(columns)].apply(pd.to_numeric, errors="coerce")
        if text is not None:
            table[text] = read[text]
        table = table.dropna()
    except (ValueError, KeyError, OSError) as error:
        raise _not_a_table(path, columns, error) from error
    return table.sort_values(columns[0], kind="stable")


def _not_a_table(path: Path, columns: Sequence[str], error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is not a table with the columns {', '.join(columns)}: {error}. It is written by RunLog."
    )


def moving_mean(values: np.ndarray, counts: np.ndarray, window: float) -> np.ndarray:
    """At each value the mean of those up to it that make up `window` counts, each weighted by its own count."""
    ends = np.cumsum(counts)
    begins = np.minimum(np.searchsorted(ends, ends - window, side="right"), np.arange(len(values)))
    totals = np.concatenate([[0.0], np.cumsum(values * counts)])
    weights = np.concatenate([[0.0], ends])
    last = np.arange(1, len(values) + 1)
    mean: np.ndarray = (totals[last] - totals[begins]) / (weights[last] - weights[begins])
    return mean


def _draw_returns(
    axes: Axes, column: str, scale: float, episodes: pd.DataFrame, evaluations: pd.DataFrame | None
) -> None:
    ordered = episodes.sort_values(column, kind="stable")
    count = int(ordered["episodes"].sum())
    window = min(100, max(20, count // 20))
    x = ordered[column] / scale
    smooth = moving_mean(ordered["return"].to_numpy(), ordered["episodes"].to_numpy(), window)
    smooth[np.cumsum(ordered["episodes"].to_numpy()) < min(window, max(1, count // 4))] = np.nan
    every = max(1, len(ordered) // _LARGEST_PLOT)
    alpha = min(0.6, max(0.12, 200 / len(ordered)))
    axes.scatter(
        x[::every],
        ordered["return"][::every],
        s=7,
        color="#4477aa",
        alpha=alpha,
        linewidths=0,
        label="training episode" if count == len(ordered) else "training episodes, means of a few",
        rasterized=True,
    )
    axes.plot(
        x, smooth, color="#224466", linewidth=1.8 if len(ordered) < 5000 else 1.2, label=f"mean of {window} episodes"
    )
    if evaluations is not None and not evaluations.empty:
        for order, marks in enumerate(_MARKS):
            shown = evaluations[evaluations["kind"] == marks.kind]
            if shown.empty:
                continue
            shown = shown.tail(1) if marks.newest else shown
            axes.plot(
                shown[column] / scale,
                shown["mean_return"],
                linestyle="none",
                marker=marks.marker,
                markersize=marks.size,
                color=marks.color,
                markeredgecolor="white",
                markeredgewidth=0.8,
                label=marks.label,
                zorder=3 + order,
            )
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
