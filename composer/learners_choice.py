"""Chooses how many Learners train, and after how many steps they average, by predictions of their placements.

The thesis chooses both by hand, after Eq. 5.6. A prediction here includes what that equation leaves out: the wait for
the slowest Learner, and the Actors, which need cores too and bring only so many transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pearl.errors import ConfigurationError, PearlError
from pearl.spec import Nodes

INTERVALS = (1, 4, 8, 16, 32)
NEAR = 1.05  # a longer interval must be this much faster than a shorter one, which keeps Learners closer
WORTH_A_LEARNER = 1.15  # predictions of several Learners are too high: by up to 10 % in `make bench-scale`

_WAITS = 0.97  # a share of the prediction, below which the Actors are waited for


@dataclass(frozen=True)
class LearnersCandidate:
    """`count` Learners that average after every `average_every` steps (0: one Learner, which does not average).

    `eps` are experiences trained per second, as placements predict them; `overall_eps` are those with all waiting for
    the Actors included. `average_us` is an iteration's share of an average if nobody trains meanwhile; `network_us` of
    it are on connections. `waiting_us` is the other time by which an iteration is longer than that of a Learner that
    trains alone. `nodes` are those of the Learners (`LearnersSpec`); empty: all are on the host.
    """

    count: int
    average_every: int
    eps: float
    overall_eps: float
    average_us: float = 0.0
    waiting_us: float = 0.0
    network_us: float = 0.0
    nodes: Nodes = ()

    @property
    def where(self) -> str:
        """Its nodes, in words."""
        return ", ".join(f"{count} on {node}" if node else f"{count} here" for node, count in self.nodes) or "here"

    def __post_init__(self) -> None:
        if self.count < 1 or self.average_every < 0 or not 0 < self.overall_eps <= self.eps < math.inf:
            raise ConfigurationError(
                "A candidate for several Learners needs a count of at least 1, average_every of at least 0, and "
                f"overall_eps above 0 and not above eps; found {self!r}."
            )


@dataclass(frozen=True)
class LearnersChoice:
    """The chosen `count` of Learners and `average_every`, the candidates, and why.

    `left_out` says why other counts are not among the candidates, `bound` which intervals were allowed and why.
    `elsewhere` are as many Learners with the same interval on other `nodes`.
    """

    count: int
    average_every: int
    candidates: tuple[LearnersCandidate, ...]
    left_out: tuple[str, ...]
    bound: str
    reason: str
    nodes: Nodes = ()
    elsewhere: tuple[LearnersCandidate, ...] = ()

    def __post_init__(self) -> None:
        self.chosen  # noqa: B018  # refuse a document without it

    @property
    def chosen(self) -> LearnersCandidate:
        """The choice, one of the candidates."""
        for candidate in self.candidates:
            found = candidate.count, candidate.average_every, candidate.nodes
            if found == (self.count, self.average_every, self.nodes):
                return candidate
        raise ConfigurationError(
            f"The choice of {self.count} Learners with average_every {self.average_every} is not one of its candidates."
        )

    def why_not(self, candidate: LearnersCandidate) -> str:
        """A few words that compare a candidate with the choice."""
        if candidate is self.chosen:
            return "chosen"
        ratio = candidate.overall_eps / self.chosen.overall_eps
        if ratio <= 1:
            return f"{1 / ratio:.2f}x slower"
        costs = "more steps" if candidate.average_every != self.average_every else "more nodes"
        return f"{ratio:.2f}x faster, too little for {costs if candidate.count == self.count else 'more Learners'}"


@dataclass(frozen=True)
class Intervals:
    """Which intervals between averages are allowed in a run of `gradient_steps` (infinity: not known).

    Local SGD converges like SGD on the whole batch if L Learners average at least every sqrt(T / L) of T steps (Stich
    2019, for convex functions, up to a constant): so much may the Learners drift apart. Beyond 32 steps nobody has
    tried it with these algorithms (the thesis: 5 to 25).
    """

    gradient_steps: float

    def allowed(self, learners: int) -> tuple[int, ...]:
        """Those for `learners`, the shortest first."""
        most = math.sqrt(self.gradient_steps / learners)
        return tuple(every for every in INTERVALS if every <= max(1.0, most))

    @property
    def text(self) -> str:
        """The rule in words."""
        rule = f"H at most {INTERVALS[-1]}, and at most the square root of T / L"
        if math.isinf(self.gradient_steps):
            return f"{rule} for T gradient steps, whose number is not known"
        return f"{rule} for T = {self.gradient_steps:,.0f} gradient steps"


PredictAt = Callable[[int], LearnersCandidate]
"""Predicts one count of Learners with an interval between averages."""

Predict = Callable[[int], PredictAt]
"""Measures a count of Learners; PearlError says why it is not possible."""


def choose_learners(
    counts: Sequence[int],
    intervals: Intervals,
    predict: Predict,
    *,
    one: LearnersCandidate | None = None,
    every: int | None = None,
    left_out: Sequence[str] = (),
) -> LearnersChoice:
    """The fastest of `one` Learner and of `counts` in rising order, with all waiting included.

    Counts, each at its fastest interval, rise as long as the prediction does; one that is taken has to be faster by
    `WORTH_A_LEARNER` than the one that was taken before. Of its intervals, the shortest is chosen that is nearly as
    fast as the fastest (`NEAR`).
    `one`: None, where the count is stated. `every` is the stated interval; None: one of `intervals`. `left_out` says
    why there are no more counts. Raises what `predict` raises if there is nothing else to choose.
    """
    candidates = [] if one is None else [one]
    reasons = list(left_out)
    fastest, last, of_count = one, one, candidates[:]
    for place, count in enumerate(counts):
        try:
            at = predict(count)
        except PearlError as error:
            if fastest is None:
                raise
            reasons.insert(0, str(error).partition("\n")[0])  # more of them are not possible either
            break
        found = [at(steps) for steps in (intervals.allowed(count) if every is None else (every,))]
        candidates += found
        best = max(found, key=lambda candidate: candidate.overall_eps)
        if fastest is None or best.overall_eps >= WORTH_A_LEARNER * fastest.overall_eps:
            fastest, of_count = best, found
        if last is not None and best.overall_eps <= last.overall_eps:
            if rest := counts[place + 1 :]:
                reasons.insert(0, f"{_listed(rest)} Learners are not measured, as {count} are no faster than fewer")
            break
        last = best
    assert fastest is not None
    chosen = next(candidate for candidate in of_count if candidate.overall_eps * NEAR >= fastest.overall_eps)
    reason = _reason(chosen, candidates, one, reasons)
    bound = intervals.text if every is None else f"H = {every} is stated"
    return LearnersChoice(
        chosen.count, chosen.average_every, tuple(candidates), tuple(reasons), bound, reason, chosen.nodes
    )


def _reason(
    chosen: LearnersCandidate,
    candidates: Sequence[LearnersCandidate],
    one: LearnersCandidate | None,
    left_out: Sequence[str],
) -> str:
    """Why this candidate, in one line."""
    others = [candidate for candidate in candidates if candidate.count != 1]
    if chosen.count == 1:
        if not others:
            return f"one Learner: {'; '.join(left_out)}"
        best = max(others, key=lambda candidate: candidate.overall_eps)
        ratio = best.overall_eps / chosen.overall_eps
        why = (
            f"one Learner: {best.count} would train {ratio:.2f} times as many experiences, at H = {best.average_every}"
        )
        if chosen.overall_eps < _WAITS * chosen.eps:
            return f"{why}; the Actors bring no more than one can train"
        return why if ratio < 1 else f"{why}; they would have to gain {WORTH_A_LEARNER:g}x"
    same = [candidate for candidate in candidates if candidate.count == chosen.count]
    fastest = max(same, key=lambda candidate: candidate.overall_eps)
    why = f"{chosen.count} Learners"
    if one is not None:
        why += f" train {chosen.overall_eps / one.overall_eps:.2f} times as many experiences as one"
    if chosen.nodes:
        why += f", {chosen.where}"
    why += f"; H = {chosen.average_every}"
    if len(same) > 1:
        gain = fastest.overall_eps / chosen.overall_eps - 1
        why += (
            " is the fastest"
            if fastest is chosen
            else f", as H = {fastest.average_every} would be only {gain:.1%} faster"
        )
    return why


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))
