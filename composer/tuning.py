"""Searches settings that the user left to the composer ("auto"), by programs that differ in one of them.

The thesis chooses them by hand (4.3.1: the delay of priority updates; 5.5: Actors). They change how long the Learner
and the Actors wait for each other, so programs are compared by their speed with all waiting included.

The replay ratio is not searched: a speed does not say how well a program learns. It is the ratio at which neither side
waits, by the times that were measured of both, within the bounds of the algorithm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from composer.placement import Placement
from composer.problem import Problem
from composer.trials import Speed
from composer.tunables import TUNABLES, Tunable
from pearl.errors import ConfigurationError

_WORTH_IT = 1.05  # a smaller gain may be noise
_SATURATED = 0.97  # the share of the time in which a Learner trains, above which more data would not help


Measure = Callable[[Problem, int], Speed | None]  # of a problem's program, in its n-th run


def updates_per_step(trainer_class: type, settings: Mapping[str, object]) -> tuple[float, float]:
    """The fewest and the most gradient steps per transition that suit a trainer, by its settings or its class."""

    def bound(name: str, usual: float) -> float:
        return float(settings.get(name, getattr(trainer_class, name, usual)))  # type: ignore[arg-type]

    return bound("least_updates_per_step", 0.0), bound("most_updates_per_step", 1.0)


def balanced_ratio(
    batch_size: int, collection_us: float, training_us: float, bounds: tuple[float, float]
) -> tuple[float, str]:
    """The replay ratio at which neither Actors nor Learner wait, and why, in one line.

    The Actors together take `collection_us` for a transition, the Learner and the Replay Manager `training_us` for a
    batch. `bounds` are the fewest and the most updates for each transition.
    """
    balanced = collection_us / training_us
    least, most = bounds
    updates = float(f"{min(max(balanced, least), most):.3g}")
    why = (
        f"{updates:g} updates of {batch_size} samples for each transition: collecting one takes "
        f"{collection_us:,.0f} us, an update {training_us:,.0f} us"
    )
    if balanced > most:
        why += f"; the Learner could make {balanced:.3g}, but the algorithm's most_updates_per_step is {most:g}"
    elif balanced < least:
        why += f"; the Actors wait, as the algorithm's least_updates_per_step is {least:g}"
    return updates * batch_size, why


def tuned(
    problem: Problem,
    placement: Placement,
    names: tuple[str, ...],
    measure: Measure,
    report: Callable[[str], None],
) -> dict[str, int]:
    """The values of the settings `names` with which the placement's program is fastest, one setting after the other.

    From its first value a setting goes up as long as that gains 5 %, else down; the winner has to win a second time.
    `measure` returns the speed of the program of a problem, or None where it cannot be tried, and raises
    ConfigurationError for a value that is refused.
    """
    found: dict[str, int] = {}
    for tunable in (TUNABLES[name] for name in TUNABLES if name in names):
        found[tunable.name] = tunable.start
        if reason := tunable.no_effect(placement):
            report(f"{tunable.name}: {tunable.start}, as {reason}")
            continue
        search = _Search(tunable, problem, measure)
        found[tunable.name] = search.best()
        if search.speeds:
            speeds = ", ".join(f"{value}: {search.mean(value):,.0f}" for value in sorted(search.speeds))
            report(f"{tunable.name}: {found[tunable.name]}, by EPS with all waiting included ({speeds})")
        else:
            report(f"{tunable.name}: {tunable.start}, as no program could be tried")
        problem = tunable.change(problem, found[tunable.name])
    return found


class _Search:
    """The search of one setting; `speeds` are those of the runs of each value."""

    def __init__(self, tunable: Tunable, problem: Problem, measure: Measure) -> None:
        self._tunable, self._problem, self._measure = tunable, problem, measure
        self.speeds: dict[int, list[Speed]] = {}

    def best(self) -> int:
        """Try values; return the fastest."""
        start, values = self._tunable.start, self._tunable.values
        if not self._try(start):
            return start
        at = values.index(start)
        (first,) = self.speeds[start]
        saturated = self._tunable.feeds and first.overall_eps > _SATURATED * first.eps
        best = start if saturated else self._climb(values[at:])
        if best == start:
            best = self._climb(values[at::-1])
        if best == start or not (self._try(start) and self._try(best)):
            return start
        return best if self._gains(start, best) else start

    def mean(self, value: int) -> float:
        """The mean speed of a value, waiting included."""
        speeds = self.speeds[value]
        return sum(speed.overall_eps for speed in speeds) / len(speeds)

    def _climb(self, values: Sequence[int]) -> int:
        """The last of the values of which each gains on the one before, the first of which is known."""
        for before, value in itertools.pairwise(values):
            if not self._try(value) or not self._gains(before, value):
                return before
        return values[-1]

    def _gains(self, before: int, value: int) -> bool:
        return self.mean(value) >= _WORTH_IT * self.mean(before)

    def _try(self, value: int) -> bool:
        """Whether the value ran once more."""
        try:
            speed = self._measure(self._tunable.change(self._problem, value), len(self.speeds.get(value, ())))
        except ConfigurationError:  # the value is too large for the replay or the machine
            return False
        if speed is not None:
            self.speeds.setdefault(value, []).append(speed)
        return speed is not None
