"""The times of an iteration's parts, measured and predicted, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pearl.runtime.scores import number

if TYPE_CHECKING:
    from rich.table import Table


def iteration_table(record: Mapping[str, Any]) -> Table | None:
    """The key "iteration" of summary.json or bench.json; None where nothing was measured."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    iteration = record.get("iteration")
    if not isinstance(iteration, Mapping):
        return None
    predicted, measured = (
        found if isinstance(found := iteration.get(key), Mapping) else {} for key in ("predicted_us", "measured_us")
    )
    if not measured:
        return None
    table = Table(title=Text("Microseconds of an iteration"), title_justify="left", box=box.ASCII2)
    table.add_column("part")
    for name in ("predicted", "measured", "measured / predicted"):
        table.add_column(name, justify="right")
    for name in dict.fromkeys([*measured, *predicted]):
        expected, found = number(predicted, name), number(measured, name)
        ratio = found / expected if expected else math.nan
        table.add_row(Text(str(name)), *(_shown(value) for value in (expected, found, ratio)))
    return table


def _shown(value: float) -> str:
    return f"{value:,.2f}" if math.isfinite(value) else "-"
