"""How a matrix and a placement read on a terminal: tables in plain characters."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from composer.matrix import AssignmentMatrix, Cell, Measurement, UnavailableDevice, UnsupportedLearner
    from composer.placement import Placement

_WIDTH = 120
_PAIRS_SHOWN = 100  # of those that are possible, and of those that are not
_LINES = ("sample", "insert", "update", "step", "with")


def matrix_report(matrix: AssignmentMatrix) -> RenderableType:
    """The table of a matrix, a line per latency, and what is left out.

    Of the Learner's other implementations a line "or step" says how long their steps take.
    """
    table = Table(title="Primitive-device assignment matrix, microseconds of one iteration", box=box.ASCII2)
    for heading in ("device", "", *matrix.columns):
        table.add_column(heading)
    for row in matrix.rows:
        columns = [_cell_lines(cell) for _, cell in row.cells()]
        for number, name in enumerate(_LINES):
            device = Text(row.device if number == 0 else "")
            cells = [Text(lines.get(name, "")) for lines in columns]
            table.add_row(device, name, *cells)
        for other in row.others:
            columns = [{}, *(_cell_lines(cell) for _, cell in other.cells())]
            for name, label in (("step", "or step"), ("with", "with")):
                table.add_row("", label, *(Text(lines.get(name, "")) for lines in columns))
        table.add_section()
    return Group(table, *_unavailable_lines(matrix.unavailable), *_unsupported_lines(matrix.unsupported))


def placement_report(placement: Placement) -> RenderableType:
    """The choice, every pair and every place of the Data Storage with its cost, and what is left out."""
    return Group(
        _choice_table(placement),
        _pairs_table(placement),
        _storage_table(placement),
        *_unavailable_lines(placement.unavailable),
        *_unsupported_lines(placement.unsupported),
    )


def plain(renderable: RenderableType, width: int = _WIDTH) -> str:
    """What rich shows of `renderable`, without colours, lines at most `width` long."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, color_system=None, highlight=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def microseconds(value: float) -> str:
    """A latency for reading: two decimals below 100, one below 1,000, none above."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _cell_lines(cell: Cell) -> dict[str, str]:
    """What a cell shows in each line of its device."""
    if not cell.measurements():
        return {_LINES[0]: cell.parameters}
    lines = {name: f"{microseconds(m.value_us):>7} {_source_text(m)}" for name, m in cell.measurements()}
    return {**lines, "with": cell.parameters}


def _source_text(measurement: Measurement) -> str:
    """Where a value comes from: `measured n=50 +-4%`, `modelled`."""
    if measurement.n == 0:
        return measurement.source
    return f"{measurement.source} n={measurement.n} +-{measurement.spread / 2:.0%}"


def _choice_table(placement: Placement) -> Table:
    delay = f"priority update delay {placement.delay_in_effect}"
    table = Table(title=f"Placement for {placement.metric}, setting {placement.setting}, {delay}", box=box.ASCII2)
    for heading in ("primitive", "device", "parameters"):
        table.add_column(heading)
    replay, learner = placement.replay_config, placement.learner_config
    tuning = f"threads {learner.threads}, sub-batches {learner.sub_batches}, streams {learner.streams}"
    tuning += ", prefetching" if learner.prefetch else ""
    actors = f"{placement.actor_count} x {placement.envs_per_actor} environments"
    for primitive, device, parameters in (
        ("Replay Manager", replay.device, f"fanout {replay.fanout}, workers {replay.workers}"),
        ("Learner", learner.device, f"{learner.implementation}, batch {placement.batch_size}, {tuning}"),
        ("Data Storage", placement.storage, f"{placement.transition_bytes:,} bytes per transition"),
        ("Actors", placement.host, actors),
    ):
        table.add_row(primitive, Text(device), Text(parameters))
    power = "" if placement.watts is None else f", {placement.watts:,.0f} W"
    table.caption = (
        f"predicted: {microseconds(placement.t_itr_us)} us per iteration, "
        f"{placement.eps:,.0f} EPS, {placement.gps:,.0f} GPS{power}\n({placement.assumption})"
    )
    return table


def _pairs_table(placement: Placement) -> Table:
    table = Table(title="Pairs of devices (PEARL Eq. 7), best first", box=box.ASCII2)
    for heading in ("RM", "Learner", "T_itr us", "EPS", "W", "why"):
        table.add_column(heading, justify="right" if heading in ("T_itr us", "EPS", "W") else "left")
    for candidate in placement.candidates[:_PAIRS_SHOWN]:
        reason = "chosen" if candidate is placement.chosen else placement.why_not(candidate)
        watts = "" if candidate.watts is None else f"{candidate.watts:,.0f}"
        devices = (candidate.replay.device, f"{candidate.learner.device} ({candidate.learner.implementation})")
        cost = (microseconds(candidate.t_itr_us), f"{candidate.eps:,.0f}", watts)
        table.add_row(*(Text(cell) for cell in (*devices, *cost, reason)))
    for pair in placement.impossible[:_PAIRS_SHOWN]:
        cells = (pair.replay_manager, pair.learner, "-", "-", "", f"not possible: {pair.reason}")
        table.add_row(*(Text(cell) for cell in cells))
    hidden = sum(max(0, len(pairs) - _PAIRS_SHOWN) for pairs in (placement.candidates, placement.impossible))
    if hidden:
        table.caption = f"{hidden:,} more pairs are in the placement itself, and in its JSON"
    return table


def _storage_table(placement: Placement) -> Table:
    table = Table(title="Data Storage (Algorithm 1, Step 2)", box=box.ASCII2)
    for heading in ("device", "traffic us", "batch to Learner us", "why"):
        table.add_column(heading, justify="right" if heading.endswith("us") else "left")
    for option in placement.chosen.storage:
        reason = "chosen" if option.device == placement.storage else placement.why_not_storage(option)
        times = (microseconds(option.traffic_us), microseconds(option.data_transfer_us))
        table.add_row(*(Text(cell) for cell in (option.device, *times, reason)))
    return table


def _unavailable_lines(unavailable: Sequence[UnavailableDevice]) -> list[Text]:
    """One line per device that is left out, with its reason."""
    return [Text(f"{device.device} is left out: {device.reason}") for device in unavailable]


def _unsupported_lines(unsupported: Sequence[UnsupportedLearner]) -> list[Text]:
    """One line per implementation of the Learner that cannot train the trainer, with what it does not support."""
    return [Text(left_out_line(learner)) for learner in unsupported]


def left_out_line(learner: UnsupportedLearner) -> str:
    """Why an implementation of the Learner is left out, in one line."""
    return f"the {learner.implementation} Learner is left out (unsupported: {learner.reason})"
