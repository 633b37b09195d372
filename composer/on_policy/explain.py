"""Explains a placement with rollouts: where the time goes, and why each other placement was not chosen."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from composer.on_policy.placement import WORTH_THREADS, RolloutCandidate, RolloutPlacement
from composer.report import plain, short_number

NAMES = {"collection": "collecting", "advantages": "GAE", "communication": "moving", "training": "training"}


@dataclass(frozen=True)
class RolloutExplanation:
    """The explanation of a placement; printable as text and with rich. `pairs` alternatives are explained."""

    placement: RolloutPlacement
    pairs: int = 4

    def __rich__(self) -> RenderableType:
        chosen, others = self.placement.choice, self.placement.candidates[1:]
        lines = [f"Chosen: {chosen.text}. {self._dominant()}"]
        lines += [f"Not chosen: {other.text}. {why_not(self.placement, other)}" for other in others[: self.pairs]]
        if left := len(others) - len(others[: self.pairs]):
            lines.append(f"{left} more are in the table.")
        return Group(self.placement, *(Text(f"\n{line}") for line in lines))

    def __str__(self) -> str:
        return plain(self)

    def _dominant(self) -> str:
        """The longest part of the chosen iteration."""
        parts = parts_of(self.placement.choice)
        name = max(parts, key=lambda part: parts[part])
        us = short_number(parts[name])
        if not self.placement.policy_lag:
            share = parts[name] / sum(parts.values())
            return f"Its parts follow each other; the longest is {NAMES[name]}, {us} us, {share:.0%} of them."
        collection = parts.pop("collection")
        after = short_number(sum(parts.values()))
        return f"Collecting, {short_number(collection)} us, runs while the other parts do, {after} us together."


def why_not(placement: RolloutPlacement, other: RolloutCandidate) -> str:
    """How much longer another candidate takes, in which parts, and how fast a part must be for it to win."""
    chosen, gap = placement.choice, other.terms.t_itr_us - placement.choice.terms.t_itr_us
    if gap <= 0 and any(_has_needless_threads(other, fewer) for fewer in placement.candidates):
        return "It needs more threads, and is not faster by a tenth than with fewer."
    if gap <= 0:
        return "Its iteration does not take longer: the choice was edited."
    mine, its = parts_of(chosen), parts_of(other)
    later = {name: us - mine.get(name, 0.0) for name, us in its.items() if us > mine.get(name, 0.0)}
    text = f"Its iteration takes {short_number(gap)} us longer"
    if later:
        text += f": {', '.join(f'{NAMES[name]} {short_number(us)} us' for name, us in later.items())} more"
    if chosen.tried is not None and other.tried is not None:
        return f"{text}. Programs of both were tried."
    if placement.policy_lag or chosen.tried is not None or other.tried is not None:
        return f"{text}."
    if other.differs_in_threads(chosen) and other.learner.threads > chosen.learner.threads:
        gap += chosen.terms.t_itr_us * (1 - 1 / WORTH_THREADS)
    wins = [f"{NAMES[name]} in {short_number(its[name] - gap)} us" for name in later if its[name] > gap]
    return f"{text}. It would be chosen with {' or '.join(wins)}." if wins else f"{text}."


def _has_needless_threads(candidate: RolloutCandidate, fewer: RolloutCandidate) -> bool:
    more = candidate.differs_in_threads(fewer) and candidate.learner.threads > fewer.learner.threads
    return more and not candidate.is_worth_its_threads(fewer)


def parts_of(candidate: RolloutCandidate) -> dict[str, float]:
    """Microseconds of the parts, without parts that take no time."""
    return {name: us for name, us in candidate.terms.parts().items() if name != "iteration"}
