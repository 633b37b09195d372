"""The part of a report on a composition: the matrix as a heat map, every placement, the stages of an iteration."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from composer.composition import Composition
from composer.html_report.svg import bar
from composer.html_report.timeline import predicted_schedule
from composer.html_report.view import SAME, HeatCell, HeatRow, Pair, Stage, Value, View
from composer.matrix import COLUMNS, AssignmentMatrix, Cell, LearnerCell, MissingCell, PairCell
from composer.measurement import Measurement
from composer.nodes import NodeShare
from composer.placement import Candidate, Placement
from composer.report import left_out_line, short_number
from pearl.errors import ConfigurationError

_MOST_PAIRS = 40
_MOST_LISTED = 40


def view(made: Composition) -> View:
    """The view of the composition for the report."""
    placement = made.placement
    rm, learner, terms = placement.replay_config, placement.learner_config, placement.terms
    metric = "energy (EPS per watt)" if placement.metric == "power_efficiency" else "throughput (EPS)"
    how = "share a device and talk directly."
    if placement.setting == 1:
        delay = placement.delay_in_effect
        how = f"are on different devices and talk through the host, with a priority update delay of {delay}."
    beyond = not_drawn = ""
    if terms.beyond_parts_us:
        us = short_number(terms.beyond_parts_us)
        beyond = f", and {us} µs that they do not explain, found when the program was tried"
        not_drawn = " without what they do not explain"
    shown, left = pairs(placement)
    return View(
        how=f"As composed for {metric}, setting {placement.setting}: Replay Manager and Learner {how}",
        host=placement.host,
        placed=_placed(placement),
        facts=(
            ("Replay Manager", f"{rm.device}: fanout {rm.fanout}, workers {rm.workers}"),
            (
                "Learner",
                f"{learner.device}: {learner.implementation}, batch {placement.batch_size}, threads {learner.threads}, "
                f"sub-batches {learner.sub_batches}{', prefetching' if learner.prefetch else ''}",
            ),
            ("Data Storage", f"{placement.storage}: {placement.transition_bytes:,} bytes per transition"),
            ("Actors", f"{placement.host}: {placement.actor_count} x {placement.envs_per_actor} environments"),
            *((f"On {share.node or placement.host}", _on_node(placement, share)) for share in placement.nodes),
            *_several_learners(placement),
        ),
        iteration=f"An iteration takes {short_number(placement.t_itr_us)} µs: as long as the slowest of the stages "
        f"that run side by side{beyond}.",
        stages=stages(placement),
        schedule=predicted_schedule(placement),
        drawn=f"Consecutive batches, drawn from the predicted terms{not_drawn}; the number is the batch",
        columns=COLUMNS,
        heat_rows=heat_rows(made.matrix, placement),
        assumption=placement.assumption,
        pair_heading="Replay Manager + Learner",
        pairs=shown,
        more_pairs=left,
        storages=_storages(placement),
        unavailable=placement.unavailable,
        left_out=_left_out(placement),
    )


def _placed(placement: Placement) -> tuple[tuple[str, str], ...]:
    """The primitives with their devices, those of nodes too; each Learner of a node has its bank."""
    here = {share.node: share for share in placement.nodes}.get("")
    own: tuple[tuple[str, str], ...] = (
        ("Replay Manager", placement.replay_manager),
        ("Learner", placement.learner),
        ("Data Storage", placement.storage),
    )
    several = placement.learner_count > 1
    found = own if here is None or not several or here.learners else ()
    if here is None or here.actors:
        found += (("Actors", placement.host),)
    for share in placement.nodes:
        if share.node and share.learners and several:
            found += ((f"{share.learners} with bank: Learner {placement.ranks_on(share.node)}", share.device),)
        if share.node and share.actors:
            found += ((f"{share.actors} Actors", share.device),)
    return found


def _on_node(placement: Placement, share: NodeShare) -> str:
    ranks = placement.ranks_on(share.node)
    learners = f"Learner {ranks}, each with a bank; " if ranks else ""
    return f"{learners}{share.actors} Actors; {share.why}"


def _several_learners(placement: Placement) -> tuple[tuple[str, str], ...]:
    """How many Learners there are, and why, if there are several or the composer chose."""
    choice, count = placement.learners_choice, placement.learner_count
    if choice is None and count == 1:
        return ()
    shares = f"each on {placement.batch_size // count} of a batch; averaged every {placement.average_every} steps"
    parts = ("one" if count == 1 else f"{count}, {shares}", *(() if choice is None else (choice.reason,)))
    return (("Count of Learners", "; ".join(parts)),)


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
        values = tuple(Value.of(name, m, fastest[name], slowest[name]) for name, m in cell.measurements())
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
        name=f"{candidate.replay.device} + {candidate.learner.device} ({candidate.learner.implementation})",
        chosen=chosen,
        t_itr=short_number(candidate.t_itr_us),
        eps=f"{candidate.eps:,.0f}",
        eps_bar=bar(candidate.eps / most_eps, "eps"),
        eps_per_watt="" if per_watt is None else short_number(per_watt),
        eps_per_watt_bar=Markup() if per_watt is None else bar(per_watt / most_per_watt, "per-watt"),
        watts="" if candidate.watts is None else f"{candidate.watts:,.0f}",
        reason=reason,
    )


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
    return Stage.all_of(list(zip(names, found, strict=False)))


def _storages(placement: Placement) -> list[tuple[str, str, str]]:
    return [
        (
            option.device,
            short_number(option.traffic_us),
            "chosen" if option.device == placement.storage else placement.why_not_storage(option),
        )
        for option in placement.chosen.storage
    ]


def _left_out(placement: Placement) -> list[str]:
    lines = [
        *(f"{found.device} is left out: {found.reason}" for found in placement.unavailable),
        *map(left_out_line, placement.unsupported),
        *(
            f"RM on {pair.replay_manager} with the Learner on {pair.learner} is not possible: {pair.reason}"
            for pair in placement.impossible
        ),
    ]
    more = len(lines) - _MOST_LISTED
    return lines if more <= 0 else [*lines[:_MOST_LISTED], f"and {more:,} more, which the composition file lists."]
