"""The part of a report on a composition with rollouts: GAE and the Learner, before or during further collecting."""

from __future__ import annotations

from markupsafe import Markup

from composer.composition import RolloutComposition
from composer.html_report.svg import bar
from composer.html_report.view import SAME, HeatCell, HeatRow, Pair, Stage, Value, View
from composer.matrix import LearnerCell, MissingCell
from composer.measurement import Measurement
from composer.on_policy.explain import NAMES, parts_of, why_not
from composer.on_policy.matrix import AdvantagesCell, RolloutMatrix
from composer.on_policy.placement import RolloutCandidate, RolloutPlacement
from composer.report import left_out_line, short_number

_COLUMNS = ("GAE", "Learner")


def view(made: RolloutComposition) -> View:
    """The view of the composition for the report."""
    placement, choice = made.placement, made.placement.choice
    found = parts_of(choice)
    collecting = found.pop("collection", 0.0)
    after = {NAMES[name]: us for name, us in found.items()}
    tried = " as its program took when it was tried" if choice.tried is not None else ""
    if placement.policy_lag:
        how = "The next rollout is collected during the training on the last one."
        stages = [("collecting", {"collecting": collecting}), ("the rest", after)]
        iteration = "Both run side by side"
    else:
        how = "Collecting and training take turns."
        stages = [("one after the other", {"collecting": collecting, **after})]
        iteration = "Its parts follow each other"
    best_us = min(candidate.terms.t_itr_us for candidate in placement.candidates)
    learner = choice.learner
    return View(
        how=f"As composed for throughput (EPS), each transition counted once. {how}",
        host=placement.host,
        placed=(("GAE", choice.advantages.device), ("Learner", learner.device), *_actors(placement)),
        facts=(
            ("GAE", choice.advantages.device),
            ("Learner", f"{learner.device}: {learner.implementation}, threads {learner.threads}"),
            ("Rollout", f"{placement.rows:,} transitions"),
            ("Actors", f"{placement.host}: {placement.actor_count} x {placement.envs_per_actor} environments"),
            *(
                (f"On {share.node or placement.host}", f"{share.actors} Actors; {share.why}")
                for share in placement.nodes
            ),
        ),
        iteration=f"An iteration, which is one rollout, takes {short_number(choice.terms.t_itr_us)} µs{tried}. "
        f"{iteration}.",
        stages=Stage.all_of(stages),
        schedule=[],
        drawn="",
        columns=_COLUMNS,
        heat_rows=_heat_rows(made.matrix, placement),
        assumption=placement.assumption,
        pair_heading="GAE + Learner",
        pairs=[_pair(placement, candidate, best_us) for candidate in placement.candidates],
        more_pairs=0,
        storages=[],
        unavailable=made.matrix.unavailable,
        left_out=[
            *(f"{found.device} is left out: {found.reason}" for found in made.matrix.unavailable),
            *map(left_out_line, made.matrix.unsupported),
        ],
    )


def _actors(placement: RolloutPlacement) -> tuple[tuple[str, str], ...]:
    """The devices of the Actors, those of nodes too."""
    here = any(share.actors for share in placement.nodes if not share.node) or not placement.nodes
    elsewhere = ((f"{share.actors} Actors", share.device) for share in placement.nodes if share.node and share.actors)
    return (*((("Actors", placement.host),) if here else ()), *elsewhere)


def _heat_rows(matrix: RolloutMatrix, placement: RolloutPlacement) -> list[HeatRow]:
    """A row for each device, and one for every further Learner on it."""
    estimates = [row.advantages.estimate for row in matrix.rows if isinstance(row.advantages, AdvantagesCell)]
    steps = [cell.step for row in matrix.rows for cell in row.learners if isinstance(cell, LearnerCell)]
    choice = placement.choice
    rows = []

    def value(name: str, measurement: Measurement, kind: list[Measurement]) -> tuple[Value, ...]:
        us = [found.value_us for found in kind]
        return (Value.of(name, measurement, min(us), max(us)),)

    for row in matrix.rows:
        gae = (
            HeatCell("GAE", "", (), chosen=False, reason=row.advantages.reason)
            if isinstance(row.advantages, MissingCell)
            else HeatCell(
                "GAE", "", value("estimate", row.advantages.estimate, estimates), choice.advantages.device == row.device
            )
        )
        for number, cell in enumerate(row.learners):
            if isinstance(cell, LearnerCell):
                here = (row.device, cell.implementation, cell.threads)
                chosen = here == (choice.learner.device, choice.learner.implementation, choice.learner.threads)
                learner = HeatCell("Learner", cell.parameters, value("rollout", cell.step, steps), chosen)
            else:
                learner = HeatCell("Learner", "", (), chosen=False, reason=cell.reason)
            first = gae if number == 0 else HeatCell("GAE", "", (), chosen=False, reason=SAME)
            rows.append(HeatRow(row.device, (first, learner)))
    return rows


def _pair(placement: RolloutPlacement, candidate: RolloutCandidate, best_us: float) -> Pair:
    us = candidate.terms.t_itr_us
    chosen = candidate is placement.choice
    return Pair(
        name=f"{candidate.advantages.device} + {candidate.learner.device} ({candidate.learner.implementation}, "
        f"threads {candidate.learner.threads})",
        chosen=chosen,
        t_itr=short_number(us),
        eps=f"{placement.rows / us * 1e6:,.0f}",
        eps_bar=bar(best_us / us, "eps"),
        eps_per_watt="",
        eps_per_watt_bar=Markup(),
        watts="",
        reason="" if chosen else why_not(placement, candidate),
    )
