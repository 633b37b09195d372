"""Fills the calibration store for a family of compositions, with an estimate of the work left."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer.composer import Composer
from composer.composing import Profiled
from composer.profiling.context import BUDGET_S
from pearl.errors import ConfigurationError, PearlError


@dataclass(frozen=True)
class Member:
    """One composition of a family, and its name in messages."""

    name: str
    composer: Composer


@dataclass(frozen=True)
class Progress:
    """A measurement that begins: how many are done, about how many are needed in all, and the seconds left."""

    done: int
    expected: int
    left_s: float
    member: str
    line: str


@dataclass(frozen=True)
class Calibrated:
    """How many measurements were made, how many were known, and whether the time ended before all were made."""

    measured: int
    known: int
    stopped: bool


class _TimeIsUpError(Exception):
    """The next measurement would begin after the end of the time budget."""


def family(
    name: str,
    composer: Composer,
    batch_sizes: Sequence[int] = (),
    capacities: Sequence[int] = (),
    fanouts: Sequence[int | str] = (),
) -> list[Member]:
    """The composition in all combinations of the sizes; an empty sequence keeps the composition's own size.

    Raises ConfigurationError for a size that a composition cannot have.
    """
    own = (None,)
    members = []
    for batch, capacity, fanout in itertools.product(batch_sizes or own, capacities or own, fanouts or own):
        sizes = {"batch": batch, "capacity": capacity, "fanout": fanout}
        words = (f"{size} {value:,}" if isinstance(value, int) else f"{size} {value}" for size, value in sizes.items())
        stated = [text for text, value in zip(words, sizes.values(), strict=True) if value is not None]
        member = ", ".join([name, *stated])
        try:
            resized = composer.resized(batch_size=batch, capacity=capacity, fanout=fanout)
        except PearlError as error:
            raise type(error)(f"{member}: {error}") from error
        members.append(Member(member, resized))
    return members


def check_budget(seconds: float | None) -> None:
    """Raise ConfigurationError for a time in which nothing can be measured."""
    if seconds is not None and not BUDGET_S <= seconds < math.inf:
        raise ConfigurationError(
            f"A time budget must be finite and at least {BUDGET_S:g} s, the time of one measurement; found "
            f"{seconds:g} s. Give more, or leave it out to measure everything."
        )


def calibrate(
    members: Sequence[Member], *, seconds: float | None = None, show: Callable[[Progress], None] = lambda _: None
) -> Calibrated:
    """Make every measurement that the compositions need and the store lacks.

    All compositions are checked before the first measurement. No measurement begins later than `seconds` after the
    first. `show` is called before each one; whatever it raises ends the work. All that was measured until then is kept.
    """
    check_budget(seconds)
    work = _Work(seconds, show)
    for member in members:
        try:
            work.missing.append(set(member.composer.missing_measurements()))
        except PearlError as error:
            raise type(error)(f"{member.name}: {error}") from error
    known = 0
    try:
        for member in members:
            known += work.on(member).known
    except _TimeIsUpError:
        return Calibrated(work.done, known, stopped=True)
    return Calibrated(work.done, known, stopped=False)


class _Work:
    """Counts the measurements of one calibration; `missing` are those of the members that have not begun."""

    def __init__(self, seconds: float | None, show: Callable[[Progress], None]) -> None:
        self.done = 0
        self.missing: list[set[str]] = []
        self._settled: set[str] = set()
        self._seconds, self._show = seconds, show
        self._began_at: float | None = None

    def on(self, member: Member) -> Profiled:
        """Make the missing measurements of the next member."""
        own = self.missing.pop(0) - self._settled
        later = len(set().union(*self.missing) - own - self._settled)
        begun = self.done

        def watch(line: str) -> None:
            now = time.monotonic()
            self._began_at = self._began_at if self._began_at is not None else now
            elapsed = now - self._began_at
            if self._seconds is not None and elapsed > self._seconds:
                raise _TimeIsUpError
            left = max(1, len(own) - (self.done - begun)) + later
            each = elapsed / self.done if self.done else BUDGET_S
            self._show(Progress(self.done, self.done + left, left * each, member.name, line))
            self.done += 1

        profiled = member.composer.profile(watch=watch)
        self._settled |= own
        return profiled
