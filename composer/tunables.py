"""The settings that a user may leave to the composer ("auto") for it to search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pearl.backends import AUTO
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from composer.placement import Placement
    from composer.problem import Problem

REPLAY_RATIO = "replay_ratio"
"""May be "auto" too, but is not searched: composer/tuning.py says why."""


@dataclass(frozen=True)
class Tunable:
    """A setting to search: its values in order, and the one to begin with, which stays where nothing can be tried."""

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
    wanted = tuple(name for name, value in settings.items() if isinstance(value, str) and value == AUTO)
    for name in wanted:
        if name not in TUNABLES and name != REPLAY_RATIO:
            raise ConfigurationError(f'{name} cannot be "auto"; {", ".join(TUNABLES)} and {REPLAY_RATIO} can.')
    return {name: value for name, value in settings.items() if name not in wanted}, wanted


def start_of(names: tuple[str, ...]) -> dict[str, int]:
    """The values with which the search of these settings begins; the replay ratio is not searched."""
    return {name: TUNABLES[name].start for name in names if name in TUNABLES}
