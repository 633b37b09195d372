"""Tables of a matrix and a placement for a terminal, in plain characters."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from composer.learners_choice import LearnersChoice
    from composer.matrix import AssignmentMatrix, Cell, LearnerCell, UnsupportedLearner
    from composer.measurement import Measurement
    from composer.placement import Candidate, LearnerConfig, Placement

_WIDTH = 120
_PAIRS_SHOWN = 100  # of the possible pairs, and of the impossible ones
_LINES = ("sample", "gather", "insert", "store", "update", "step", "with")
_RATES = ("EPS", "EPS/W")
_WAITS = 0.9  # the share of the time in which a Learner trains, below which a report says that it waits


def matrix_report(matrix: AssignmentMatrix) -> RenderableType:
    """The table of a matrix with a line per latency, and a line for everything that is left out.

    A line "or step" shows the step of each other implementation of the Learner.
    """
    title = "Primitive-device assignment matrix, microseconds of one iteration"
    primitives = matrix.columns[:3]
    table = ascii_table(title, ("device", "", *primitives))
    for row in matrix.rows:
        cells_of = (cell for name, cell in row.cells() if name in primitives)
        columns = [_cell_lines(cell) | _rate_lines(matrix, row.device, cell) for cell in cells_of]
        shown = [name for name in (*_LINES, *_RATES) if any(name in lines for lines in columns)]
        for number, name in enumerate(shown):
            device = Text(row.device if number == 0 else "")
            cells = [Text(lines.get(name, "")) for lines in columns]
            table.add_row(device, name, *cells)
        for other in row.others:
            columns = [{}, *(_cell_lines(cell) for _, cell in other.cells())]
            for name, label in (("step", "or step"), ("with", "with")):
                table.add_row("", label, *(Text(lines.get(name, "")) for lines in columns))
        table.add_section()
    return Group(table, _matrix_storage_table(matrix), *_left_out_lines(matrix))


def _matrix_storage_table(matrix: AssignmentMatrix) -> Table:
    table = ascii_table("Data Storage, microseconds of one iteration", ("device", "gather", "store"))
    for row in matrix.rows:
        lines = _cell_lines(row.storage)
        _add_row(table, row.device, lines.get("gather", lines.get(_LINES[0], "")), lines.get("store", ""))
    return table


def placement_report(placement: Placement) -> RenderableType:
    """The choice, every pair and every place of the Data Storage with its cost, and everything that is left out."""
    tables = (_choice_table(placement), _pairs_table(placement), _storage_table(placement))
    choice = placement.learners_choice
    several = () if choice is None else learners_report(choice)
    return Group(*tables, *several, *_left_out_lines(placement))


def learners_report(choice: LearnersChoice) -> tuple[RenderableType, ...]:
    """The counts of Learners and the intervals that were compared, and why one was chosen."""
    costs = ("Learners", "H", "EPS", "with the Actors' pace", "averaging us", "waiting us")
    has_nodes = any(candidate.nodes for candidate in choice.candidates)
    further = ("nodes", "network us") if has_nodes else ()
    headings = (*costs[:2], *further[:1], *costs[2:5], *further[1:], costs[5], "why")
    table = ascii_table("Learners, and steps between averages (H)", headings, right=(*costs, *further[1:]))
    for candidate in (*choice.candidates, *choice.elsewhere):
        several = candidate.count > 1
        average, network, waiting = (
            short_number(us) if several else "-"
            for us in (candidate.average_us, candidate.network_us, candidate.waiting_us)
        )
        _add_row(
            table,
            str(candidate.count),
            str(candidate.average_every) if several else "-",
            *((candidate.where,) if has_nodes else ()),
            f"{candidate.eps:,.0f}",
            f"{candidate.overall_eps:,.0f}",
            average,
            *((network,) if has_nodes else ()),
            waiting,
            choice.why_not(candidate),
        )
    table.title_justify = "left"
    return (table, *(Text(line) for line in (choice.reason, choice.bound, *choice.left_out)))


def ascii_table(title: str | Text, headings: Sequence[str], right: Collection[str] = ()) -> Table:
    """An empty table in plain characters; the columns in `right` are aligned to the right.

    Long words go on in the next line. Numbers, which are in `right`, are cut with a mark, as a part looks like another.
    """
    table = Table(title=title, box=box.ASCII2)
    for heading in headings:
        if heading in right:
            table.add_column(heading, justify="right")
        else:
            table.add_column(heading, overflow="fold")
    return table


def plain(renderable: RenderableType, width: int = _WIDTH) -> str:
    """`renderable` as rich prints it, without colours, in lines of at most `width` characters."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, color_system=None, highlight=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def short_number(value: float) -> str:
    """A latency, or EPS per watt, in text: two decimals below 100, one below 1,000, none above."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def power_text(candidate: Candidate) -> tuple[str, str]:
    """The watts, and the EPS per watt, of the devices in use; and with idle devices if these draw power."""
    if candidate.watts is None or candidate.eps_per_watt is None or candidate.eps_per_machine_watt is None:
        return "", ""
    watts, per_watt = f"{candidate.watts:,.0f}", short_number(candidate.eps_per_watt)
    if not candidate.idle_watts:
        return watts, per_watt
    return f"{watts} + {candidate.idle_watts:,.0f}", f"{per_watt} / {short_number(candidate.eps_per_machine_watt)}"


def learner_tuning(learner: LearnerCell | LearnerConfig) -> str:
    """The parameters of a Learner in words, without its implementation."""
    tuning = f"threads {learner.threads}, sub-batches {learner.sub_batches}"
    if learner.unroll:
        tuning += f", unroll {', '.join('-'.join(map(str, network)) for network in learner.unroll)}"
    return f"{tuning}{', prefetching' if learner.prefetch else ''}"


def _cell_lines(cell: Cell) -> dict[str, str]:
    """The text of a cell in each line of its device."""
    if not cell.measurements():
        return {_LINES[0]: cell.parameters}
    lines = {name: f"{short_number(m.value_us):>7} {_source_text(m)}" for name, m in cell.measurements()}
    return {**lines, "with": cell.parameters}


def _rate_lines(matrix: AssignmentMatrix, device: str, cell: Cell) -> dict[str, str]:
    """EPS and EPS per watt of the device, if an iteration had the cell's latencies alone."""
    eps, per_watt = matrix.eps(cell), matrix.eps_per_watt(device, cell)
    lines = {} if eps is None else {"EPS": f"{eps:>7,.0f}"}
    return lines if per_watt is None else {**lines, "EPS/W": f"{short_number(per_watt):>7} stated W"}


def _source_text(measurement: Measurement) -> str:
    """The source of a value, such as `measured n=50 +-4%` or `modelled`."""
    heads = dict.fromkeys(part.partition(":")[0] for part in measurement.note.split("; ") if part)
    source = ", ".join((measurement.source, *heads))
    if measurement.n == 0:
        return source
    return f"{source} n={measurement.n} +-{measurement.spread / 2:.0%}"


def _choice_table(placement: Placement) -> Table:
    delay = f"priority update delay {placement.delay_in_effect}"
    title = f"Placement for {placement.metric}, setting {placement.setting}, {delay}"
    table = ascii_table(title, ("primitive", "device", "parameters"))
    replay, learner = placement.replay_config, placement.learner_config
    tuning = f"{learner.implementation}, batch {placement.batch_size}, {learner_tuning(learner)}"
    if placement.learner_count > 1:
        tuning = (
            f"{placement.learner_count} x {learner.implementation}, batch "
            f"{placement.batch_size // placement.learner_count} each, {learner_tuning(learner)}; averaged every "
            f"{placement.average_every} steps ({short_number(placement.terms.average_us)} us per iteration, and "
            f"{short_number(placement.terms.waiting_us)} us of waiting)"
        )
    _add_row(table, "Replay Manager", replay.device, f"fanout {replay.fanout}, workers {replay.workers}")
    _add_row(table, "Learner", learner.device, tuning)
    _add_row(table, "Data Storage", placement.storage, f"{placement.transition_bytes:,} bytes per transition")
    actors = f"{placement.actor_count} x {placement.envs_per_actor} environments"
    if not placement.nodes:
        _add_row(table, "Actors", placement.host, actors)
    for share in placement.nodes:
        where = share.device + (f", node {share.node}" if share.node else "")
        if ranks := placement.ranks_on(share.node):
            _add_row(table, f"Learner {ranks}", where, "with a bank of the replay each, as above")
        _add_row(table, "Actors", where, f"{share.actors} x {placement.envs_per_actor} environments; {share.why}")
    power = "" if placement.watts is None else f", {placement.watts:,.0f} W, {_per_watt(placement)}"
    table.caption = (
        f"predicted: {short_number(placement.t_itr_us)} us per iteration, "
        f"{placement.eps_text} EPS, {placement.gps:,.0f} GPS{power}\n({placement.assumption})"
    )
    if placement.replay_ratio_reason:
        table.caption += f"\nreplay ratio {placement.replay_ratio:g}: {placement.replay_ratio_reason}"
    if placement.watts is not None:
        table.caption += f"\n{_power_note(placement)}"
    if placement.overall_eps is not None and placement.overall_eps < _WAITS * placement.eps:
        table.caption += f"\nwith all waiting for data included: {placement.overall_eps:,.0f} EPS"
    return table


def _per_watt(placement: Placement) -> str:
    used, machine = placement.eps_per_watt, placement.eps_per_machine_watt
    assert used is not None
    assert machine is not None
    with_idle = f" ({short_number(machine)} with idle devices)" if placement.idle_watts else ""
    return f"{short_number(used)} EPS/W{with_idle}"


def _power_note(placement: Placement) -> str:
    """Where the watts are from, and what they do not count."""
    note = "watts as stated in the device CSV"
    if placement.idle_watts:
        note += f"; devices that stay idle draw {placement.idle_watts:,.0f} W more"
    if unstated := placement.chosen.idle_unstated:
        note += f"; idle_watts of {', '.join(unstated)} not stated, taken as 0"
    return note


def _pairs_table(placement: Placement) -> Table:
    title, costs = "Pairs of devices, best first", ("T_itr us", "Eq. 7 us", "EPS", "W", "EPS/W")
    table = ascii_table(title, ("RM", "Learner", *costs, "why"), right=costs)
    for candidate in placement.candidates[:_PAIRS_SHOWN]:
        reason = "chosen" if candidate is placement.chosen else placement.why_not(candidate)
        devices = (candidate.replay.device, f"{candidate.learner.device} ({candidate.learner.implementation})")
        latencies = (short_number(us) for us in (candidate.t_itr_us, candidate.terms.eq7_us))
        cost = (*latencies, f"{candidate.eps:,.0f}", *power_text(candidate))
        _add_row(table, *devices, *cost, reason)
    for pair in placement.impossible[:_PAIRS_SHOWN]:
        _add_row(table, pair.replay_manager, pair.learner, "-", "-", "-", "", "", f"not possible: {pair.reason}")
    hidden = sum(max(0, len(pairs) - _PAIRS_SHOWN) for pairs in (placement.candidates, placement.impossible))
    notes = []
    if any(candidate.idle_watts for candidate in placement.candidates):
        notes.append("W: devices in use + idle devices; EPS/W: per watt of those in use / of all")
    if hidden:
        notes.append(f"{hidden:,} more pairs are in the placement itself, and in its JSON")
    table.caption = "\n".join(notes) or None
    return table


def _storage_table(placement: Placement) -> Table:
    costs = ("traffic us", "batch to Learner us")
    table = ascii_table("Data Storage (Algorithm 1, Step 2)", ("device", *costs, "why"), right=costs)
    for option in placement.chosen.storage:
        reason = "chosen" if option.device == placement.storage else placement.why_not_storage(option)
        _add_row(table, option.device, short_number(option.traffic_us), short_number(option.data_transfer_us), reason)
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))  # as Text: rich would take brackets in a name for markup


def _left_out_lines(found: AssignmentMatrix | Placement) -> list[Text]:
    """A line per device and per implementation of the Learner that is left out, with the reason."""
    devices = [f"{device.device} is left out: {device.reason}" for device in found.unavailable]
    return [Text(line) for line in (*devices, *map(left_out_line, found.unsupported))]


def left_out_line(learner: UnsupportedLearner) -> str:
    """One line that says why an implementation of the Learner is left out."""
    threads = f" on {learner.threads} threads" if learner.threads else ""
    return f"the {learner.implementation} Learner{threads} is left out ({learner.cause})"
