"""The lower half of the live view: how busy each primitive is, and how full the queues are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

from pearl.runtime.telemetry import Activity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LEAST_WIDTH, _SPARE_LINES = 64, 6  # a smaller terminal shows the progress only
_BAR_WIDTH = 12


def fits(activity: Activity, console: Console) -> bool:
    """Whether the terminal has room for it."""
    rows = 1 + max(len(activity.busy), len(activity.levels))
    return console.width >= _LEAST_WIDTH and console.height >= rows + _SPARE_LINES


def dashboard(activity: Activity) -> RenderableType:
    """Two columns of bars: primitives on the left, queues on the right."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "left", "left", "right"):
        table.add_column(no_wrap=True, justify=justify)
    for row in zip_longest(_busy(activity), _levels(activity), fillvalue=("", "", "")):
        table.add_row(*row[0], *row[1])
    return table


def _busy(activity: Activity) -> Iterator[tuple[RenderableType, ...]]:
    yield "[dim]busy[/dim]", "", ""
    for name, share in activity.busy.items():
        yield name, _bar(share), f"{share:.0%}"


def _levels(activity: Activity) -> Iterator[tuple[RenderableType, ...]]:
    yield "[dim]queues[/dim]", "", ""
    for name, level in activity.levels.items():
        yield name, _bar(level.share), f"{level.filled:,}/{level.capacity:,}"


def _bar(share: float) -> RenderableType:
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=1.0, completed=min(1.0, share), width=_BAR_WIDTH, finished_style="bar.complete")
