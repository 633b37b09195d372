"""The lower half of the live view: how busy each primitive is, and how full the queues are."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from pearl.runtime.telemetry import Activity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LEAST_WIDTH, _SPARE_LINES = 72, 6  # a smaller terminal shows the progress only
_BAR_CELLS = 12


def fits(activity: Activity, console: Console) -> bool:
    """Whether the terminal has room for it."""
    rows = 1 + max(len(activity.busy), len(activity.levels))
    return console.width >= _LEAST_WIDTH and console.height >= rows + _SPARE_LINES


def dashboard(activity: Activity, console: Console) -> Text:
    """Two columns of bars: primitives on the left, queues on the right."""
    # One text, not a table: laying out a table takes ten times as long.
    from rich.text import Text

    text = Text(f"{'busy':<36}queues", "dim", no_wrap=True, overflow="ellipsis")
    mark = "#" if console.options.ascii_only else "━"
    busy = [(name, share, f"{share:.0%}") for name, share in activity.busy.items()]
    levels = [(n, level.share, f"{level.filled:,}/{level.capacity:,}") for n, level in activity.levels.items()]
    for left, right in zip_longest(busy, levels):
        text.append("\n")
        for cell, width in ((left, 15), (right, 7)):
            name, share, number = cell or ("", 0.0, "")
            filled = mark * round(_BAR_CELLS * min(1.0, share))
            text.append(f"{name:<{width}} ", "not dim").append(f"{filled:<{_BAR_CELLS}}", "not dim magenta")
            text.append(f"{number:>6}  " if width == 15 else f"{number:>11}", "not dim")
    return text
