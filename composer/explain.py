"""Explains a placement: every term of the chosen and the rejected pairs, the deciding term, and break-even values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer.placement import BEYOND_PARTS, StorageOption
from composer.report import ascii_table, learners_report, left_out_line, plain, short_number
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from composer.evidence import BreakEven
    from composer.placement import Candidate, IterationTerms, Placement

_BYTES_PER_GB = 1e9
_LISTED = 20  # impossible pairs


@dataclass(frozen=True)
class Explanation:
    """The explanation of one placement, or of several placements of one problem; printable as text and with rich.

    `pairs` is the number of rejected pairs that are shown term by term. `names` name several placements, such as their
    files.
    """

    placements: tuple[Placement, ...]
    pairs: int = 4
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse several placements that do not answer one question."""
        for field in ("metric", "transition_bytes"):
            found = dict.fromkeys(getattr(placement, field) for placement in self.placements)
            if len(found) > 1:
                raise ConfigurationError(
                    f"An explanation compares placements of one problem and metric; found {field} "
                    f"{' and '.join(map(str, found))}. Explain them one at a time."
                )

    def __rich__(self) -> RenderableType:
        if len(self.placements) > 1:
            return _comparison(self.placements, self.names)
        (placement,) = self.placements
        rejected = [candidate for candidate in placement.candidates if candidate is not placement.chosen]
        shown = (placement.chosen, *rejected[: self.pairs])
        parts: list[RenderableType] = [
            _choice(placement),
            *_several_learners(placement),
            _terms_table(placement, shown),
            *_stage_lines(placement, shown),
            *_reason_lines(placement, shown, len(rejected) + 1 - len(shown)),
            _break_even_table(placement),
            _storage_table(placement),
        ]
        return Group(*parts)

    def __str__(self) -> str:
        return plain(self)


def term_name(field: str) -> str:
    """A field of the terms in words: `sample_transfer_us` becomes `sample transfer`."""
    return field.removesuffix("_us").replace("_", " ")


def term_values(terms: IterationTerms) -> dict[str, float]:
    """Every latency in the terms, by its field."""
    return {f.name: getattr(terms, f.name) for f in dataclasses.fields(terms) if f.name.endswith("_us")}


def _terms_of(placement: Placement, candidate: Candidate) -> IterationTerms:
    """The terms with the Data Storage that was chosen, or for another pair with its best one."""
    return placement.terms if candidate is placement.chosen else candidate.terms


def dominant(terms: IterationTerms) -> tuple[str, float]:
    """The largest term of the critical path and its share of T_itr, from 0 to 1."""
    critical = terms.critical()
    name = max(critical, key=lambda term: critical[term])
    return name, critical[name] / terms.t_itr_us


def _label(candidate: Candidate) -> str:
    return f"RM {candidate.replay.device}, Learner {candidate.learner.device} ({candidate.learner.implementation})"


def _table(title: str, headings: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = ascii_table(title, headings, right=right)
    table.title_justify = "left"
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))


def _choice(placement: Placement) -> Text:
    best, chosen = placement.candidates[0], placement.chosen
    text = (
        f"Chosen for {placement.metric}: {_label(chosen)}, Data Storage {placement.storage}. Setting "
        f"{placement.setting}, batch {placement.batch_size:,}, fanout {chosen.replay.fanout}.\n"
        f"Predicted: {short_number(placement.t_itr_us)} us per iteration, {placement.eps_text} EPS, "
        f"{placement.assumption}."
    )
    if placement.replay_ratio_reason:
        text += f"\nThe replay ratio: {placement.replay_ratio_reason}."
    if best is not chosen:
        text += f"\nThis choice was edited. Algorithm 1 chose {_label(best)}."
    return Text(text + "\n")


def _several_learners(placement: Placement) -> Iterator[RenderableType]:
    if placement.learners_choice is not None:
        yield from learners_report(placement.learners_choice)
        yield Text("")


def _terms_table(placement: Placement, shown: Sequence[Candidate]) -> Table:
    headings = [
        f"{'chosen' if candidate is placement.chosen else 'rejected'}:\n{candidate.replay.device} +\n"
        f"{candidate.learner.device}\n({candidate.learner.implementation})"
        for candidate in shown
    ]
    table = _table("Terms of an iteration, microseconds (RM + Learner)", ["term"])
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    columns = [term_values(_terms_of(placement, candidate)) for candidate in shown]
    for field in columns[0]:
        _add(table, term_name(field), *(short_number(values[field]) for values in columns))
    table.add_section()
    for name, cells in _summary(placement, shown).items():
        _add(table, name, *cells)
    return table


def _summary(placement: Placement, shown: Sequence[Candidate]) -> Mapping[str, list[str]]:
    """The rows below the terms: times, rates, and the term that matters most."""
    terms = [_terms_of(placement, candidate) for candidate in shown]
    rows = {
        "T_itr, steady state": [short_number(t.t_itr_us) for t in terms],
        "Eq. 7 as printed": [short_number(t.eq7_us) for t in terms],
        "EPS": [f"{placement.batch_size / t.t_itr_us * 1e6:,.0f}" for t in terms],
    }
    if all(candidate.watts for candidate in shown):
        rows["watts"] = [f"{candidate.watts:,.0f}" for candidate in shown]
        rows["EPS per watt"] = [
            f"{c.score('power_efficiency') * c.t_itr_us / t.t_itr_us:,.1f}" for c, t in zip(shown, terms, strict=True)
        ]
    rows["dominant term"] = ["{} ({:.0%})".format(*dominant(t)) for t in terms]
    return rows


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


def _stage_lines(placement: Placement, shown: Sequence[Candidate]) -> Iterator[RenderableType]:
    yield Text("\nStages that run side by side; the slowest one (>) makes T_itr, with what a trial found beyond it:")
    for candidate in shown:
        terms = _terms_of(placement, candidate)
        order = "strict order" if not terms.delay else f"{terms.delay + 1} batches under way"
        yield Text(f"{_label(candidate)}, {order}")
        slowest = max(sum(stage.values()) for stage in terms.stages())
        for stage in terms.stages():
            total = sum(stage.values())
            parts = [f"{name} {short_number(value)}" for name, value in stage.items() if value]
            mark = ">" if total == slowest else " "
            yield _indented(f"{mark} {short_number(total)} us = {' + '.join(parts) or '0'}")
            if total == slowest:
                slowest = -1.0  # of equal stages only the first is marked
        if beyond := terms.beyond_parts_us:
            sign = "+" if beyond > 0 else "-"
            yield _indented(f"  {sign} {short_number(abs(beyond))} us {BEYOND_PARTS}: its program was tried")


def _reason_lines(placement: Placement, shown: Sequence[Candidate], hidden: int) -> Iterator[RenderableType]:
    yield Text("\nWhy not:")
    for candidate in shown[1:]:
        yield _indented(f"{_label(candidate)}: {placement.why_not(candidate)}")
    if hidden > 0:
        yield _indented(f"and {hidden:,} more possible pairs, each worse than those above (--pairs shows more)")
    for pair in placement.impossible[:_LISTED]:
        yield _indented(f"RM {pair.replay_manager}, Learner {pair.learner}: not possible: {pair.reason}")
    if len(placement.impossible) > _LISTED:
        yield _indented(f"and {len(placement.impossible) - _LISTED:,} more impossible pairs")
    for device in placement.unavailable:
        yield _indented(f"{device.device} is left out: {device.reason}")
    for learner in placement.unsupported:
        yield _indented(f"{left_out_line(learner)}")
    yield Text("")


def _break_even_table(placement: Placement) -> RenderableType:
    best = placement.candidates[0]
    title = f"What would change the choice of {_label(best)}, all else equal"
    if placement.evidence is None:
        return Text(f"{title}: not known. This placement was written without break-even values; compose again.\n")
    table = _table(title, ("quantity", "now", "changes at", "then chosen, or why not", "assumed"))
    table.columns[1].justify = table.columns[2].justify = "right"
    for found in placement.evidence.break_evens:
        at = "-" if found.at is None else f"{found.at:,.4g}"
        _add(table, found.quantity, f"{found.now:,.4g}", at, _consequence(found), found.assumption)
    note = (
        "One input at a time is changed, and Algorithm 1 decides again. What trials found beyond the parts "
        "stays as it is: how it scales is not known."
    )
    return Group(table, Text(note))


def _consequence(found: BreakEven) -> str:
    if found.at is None:
        return found.reason
    return f"RM {found.replay_manager}, Learner {found.learner} ({found.implementation})"


def _storage_table(placement: Placement) -> Table:
    costs = [f.name for f in dataclasses.fields(StorageOption) if f.name != "device"]
    right = (*map(_cost_name, costs), "memory GB")
    needed = ""
    if placement.evidence is not None:
        size = placement.evidence.replay_capacity * placement.transition_bytes / _BYTES_PER_GB
        needed = f"; {placement.evidence.replay_capacity:,} transitions need {size:,.3g} GB"
    table = _table(f"\nData Storage (Algorithm 1, Step 2){needed}", ("device", *right, "why"), right=right)
    options = {option.device: option for option in placement.chosen.storage}
    for name in dict.fromkeys((*options, placement.learner, placement.host, placement.replay_manager)):
        site = None if placement.evidence is None else placement.evidence.site(name)
        device = None if placement.evidence is None else placement.evidence.device(name)
        memory = "" if device is None or device.memory_gb is None else f"{device.memory_gb:,.4g}"
        if name in options:
            reason = "chosen" if name == placement.storage else placement.why_not_storage(options[name])
            values = [_cost(cost, getattr(options[name], cost)) for cost in costs]
        else:
            refusal = None if site is None else site.with_learner if name == placement.learner else site.without_learner
            reason = f"not possible: {refusal or 'no Data Storage for this pair'}"
            values = ["-"] * len(costs)
        _add(table, name, *values, memory, reason)
    return table


def _cost_name(field: str) -> str:
    """A field of a place for the Data Storage in words, with its unit."""
    return f"{term_name(field)} us" if field.endswith("_us") else field.replace("_", " ")


def _cost(field: str, value: float) -> str:
    return short_number(value) if field.endswith("_us") else f"{value:,.0f}"


def _comparison(placements: Sequence[Placement], names: Sequence[str]) -> RenderableType:
    """A line per placement, in the order of batch size and fanout, and where the choice changes."""
    right = ("batch", "fanout", "T_itr us", "EPS")
    table = _table(
        "Choices of several placements", (*right[:2], "RM", "Learner", *right[2:], "dominant term", "from"), right=right
    )
    numbered = [
        (placement, names[number] if number < len(names) else "") for number, placement in enumerate(placements)
    ]
    numbered.sort(key=lambda found: (found[0].batch_size, found[0].chosen.replay.fanout))
    lines: list[Text] = []
    for number, (placement, name) in enumerate(numbered):
        chosen = placement.chosen
        _add(
            table,
            f"{placement.batch_size:,}",
            str(chosen.replay.fanout),
            chosen.replay.device,
            f"{chosen.learner.device} ({chosen.learner.implementation})",
            short_number(placement.t_itr_us),
            f"{placement.eps:,.0f}",
            "{} ({:.0%})".format(*dominant(placement.terms)),
            name,
        )
        if number and numbered[number - 1][0].chosen.names != chosen.names:
            before = numbered[number - 1][0]
            lines.append(
                Text(
                    f"Between batch {before.batch_size:,}, fanout {before.chosen.replay.fanout} and batch "
                    f"{placement.batch_size:,}, fanout {chosen.replay.fanout} the choice changes from "
                    f"{_label(before.chosen)} to {_label(chosen)}."
                )
            )
    return Group(table, *(lines or [Text("The choice is the same in all of them.")]))
