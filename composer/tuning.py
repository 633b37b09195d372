"""Searches settings that the user left to the composer ("auto"), by programs that differ in one of them.

The thesis chooses them by hand (4.3.1: the delay of priority updates; 5.5: Actors). What they change is how long the
Learner and the Actors wait for each other, so programs are compared by their speed with all waiting included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from composer.placement import Placement
from composer.problem import Problem
from composer.trials import Speed
from pearl.errors import ConfigurationError

AUTO = "auto"

_WORTH_IT = 1.05  # a gain below this is not told from noise
_SATURATED = 0.97  # the share of the time in which a Learner trains, above which more data would not help


Measure = Callable[[Problem], Speed | None]


@dataclass(frozen=True)
class Tunable:
    """A setting to search: its values in order, and the one to begin with, which a run without "auto" has."""

    name: str
    values: tuple[int, ...]
    start: int
    change: Callable[[Problem, int], Problem]
    feeds: bool = False  # a higher value collects faster
    no_effect: Callable[[Placement], str] = lambda _: ""


def _field(part: str, name: str) -> Callable[[Problem, int], Problem]:
    def change(problem: Problem, value: int) -> Problem:
        changed = dataclasses.replace(getattr(problem, part), **{name: value})
        return dataclasses.replace(problem, **{part: changed})

    return change


def _only_setting_1(placement: Placement) -> str:
    return "" if placement.setting == 1 else "setting 2 samples after the last update: the delay has no effect"


TUNABLES = {
    tunable.name: tunable
    for tunable in (
        Tunable("envs_per_actor", (1, 2, 4, 8, 16, 32, 64), 8, _field("actors", "envs_per_actor"), feeds=True),
        Tunable("num_actors", (1, 2, 4, 8, 16, 32, 64), 1, _field("actors", "count"), feeds=True),
        Tunable(
            "priority_update_delay",
            (0, 1, 2, 4, 8),
            1,
            _field("train", "priority_update_delay"),
            no_effect=_only_setting_1,
        ),
        Tunable("insertion_rows", (32, 128, 512, 2048), 128, _field("train", "insertion_rows")),
    )
}


def without_auto(settings: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """The settings that have a value, and the names of those to search. ConfigurationError for one that cannot be."""
    wanted = tuple(name for name, value in settings.items() if value == AUTO)
    for name in wanted:
        if name not in TUNABLES:
            raise ConfigurationError(f'{name} cannot be "auto"; {", ".join(TUNABLES)} can.')
    return {name: value for name, value in settings.items() if value != AUTO}, wanted


def start_of(names: tuple[str, ...]) -> dict[str, int]:
    """The values with which the search of these settings begins."""
    return {name: TUNABLES[name].start for name in names}


def tuned(
    problem: Problem,
    placement: Placement,
    names: tuple[str, ...],
    measure: Measure,
    report: Callable[[str], None],
) -> dict[str, int]:
    """The values of the settings `names` with which the placement's program is fastest, one setting after the other.

    From its first value a setting goes up as long as that gains 5 %, or else down. `measure` returns the speed of the
    program of a problem, or None where it cannot be tried, and raises ConfigurationError for a value that is refused.
    """
    found: dict[str, int] = {}
    for tunable in (TUNABLES[name] for name in TUNABLES if name in names):
        found[tunable.name] = tunable.start
        if reason := tunable.no_effect(placement):
            report(f"{tunable.name}: {tunable.start}, as {reason}")
            continue
        speeds: dict[int, Speed] = {}
        for value in _climb(tunable, speeds):
            try:
                speed = measure(tunable.change(problem, value))
            except ConfigurationError:  # more than the replay or the machine takes
                speed = None
            if speed is None:
                break
            speeds[value] = speed
        if not speeds:
            report(f"{tunable.name}: {tunable.start}, as no program could be tried")
            continue
        best = _best(speeds, tunable.start)
        listed = ", ".join(f"{value}: {speeds[value].overall_eps:,.0f}" for value in sorted(speeds))
        report(f"{tunable.name}: {best}, by EPS with all waiting included ({listed})")
        found[tunable.name] = best
        problem = tunable.change(problem, best)
    return found


def _climb(tunable: Tunable, speeds: Mapping[int, Speed]) -> Iterator[int]:
    """The values to try next, given the speeds of those tried."""
    start = tunable.values.index(tunable.start)
    yield tunable.start
    now = speeds.get(tunable.start)
    if now is None:
        return
    fed = tunable.feeds and now.overall_eps > _SATURATED * now.eps  # the Learner never waits for data
    ways = [tunable.values[start - 1 :: -1] if start else (), () if fed else tunable.values[start + 1 :]]
    for way in reversed(ways):
        before = tunable.start
        for value in way:
            yield value
            if value not in speeds or speeds[value].overall_eps < _WORTH_IT * speeds[before].overall_eps:
                break
            before = value
        if before != tunable.start:
            return


def _best(speeds: Mapping[int, Speed], start: int) -> int:
    """The fastest value; the first one unless another gains enough."""
    best = max(speeds, key=lambda value: speeds[value].overall_eps)
    return best if speeds[best].overall_eps >= _WORTH_IT * speeds[start].overall_eps else start
