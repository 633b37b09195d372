"""The contract of averaging between Learners, whatever carries the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from pearl.errors import ConfigurationError
from pearl.spec import check_overlap


def always() -> bool:
    """True: the parameters of an average with its own memory are always whole."""
    return True


class Average(NamedTuple):
    """One average: `version` counts from 0, the parameters at the beginning.

    `parameters` `(count,)` float32, not to be changed; `facts` `(learners, facts)` float64, what each Learner said with
    its parameters, NaN for those that are not part of the average. Both are valid until the next average is asked for.

    A Learner that was silent for so long that the others averaged twice without it may read parameters that are being
    overwritten: `is_whole()`, asked after they were read, is then False. `Averager.join` gives the newest average.
    """

    version: int
    parameters: np.ndarray
    facts: np.ndarray
    is_whole: Callable[[], bool] = always

    @property
    def members(self) -> np.ndarray:
        """Whose parameters were averaged, `(learners,)` bool; none in version 0."""
        found: np.ndarray = ~np.isnan(self.facts[:, 0])
        return found


class Averager(Protocol):
    """One Learner's side. Its thread calls all methods."""

    def join(self) -> Average:
        """Take part from now on, and return the last average, from which the Learner begins. May be repeated."""

    def beat(self) -> None:
        """Give a sign of life; a Learner calls it at least once each gradient step, and while it waits for data."""

    def expect(self, seconds: float) -> None:
        """Say how long the next steps may take without a sign of life; the others wait at least that long."""

    def average(self, parameters: np.ndarray, facts: np.ndarray) -> Average:
        """Hand in `(count,)` float32 and `(facts,)` float64, and wait for the next average.

        If the others did not wait for this Learner, its steps since its last average are lost: the newest average comes
        back at once. Raises QueueClosedError when averaging is over.
        """

    def leave(self) -> None:
        """Stop taking part: the others no longer wait for this Learner."""


@runtime_checkable
class OverlappedAverager(Averager, Protocol):
    """An `Averager` whose Learner may train while an average is made: `AveragingSpec.overlap`.

    `average` is `hand_in` followed at once by `take`.
    """

    def hand_in(self, parameters: np.ndarray, facts: np.ndarray) -> None:
        """Hand in `(count,)` float32 and `(facts,)` float64 for the next average, and return.

        Both may be changed afterwards. `take` must come before the next `hand_in`. Raises QueueClosedError when
        averaging is over.
        """

    def take(self) -> Average:
        """Wait for the average that follows the last `hand_in`.

        It includes what this Learner handed in if its version is the next one and this Learner is one of its `members`.
        If the others did not wait for this Learner, the newest average comes back. Raises QueueClosedError when
        averaging is over.
        """


@dataclass(frozen=True)
class AveragingSpec:
    """`learners` average their parameters after every `average_every` gradient steps of each (H).

    A Learner that gives no sign of life for `timeout_s` seconds, or twice as long as its steps take, is not waited for.
    While an average is made, each Learner makes `overlap` further steps, at most H (docs/local_sgd.md, "Overlap"); with
    0 it waits.
    """

    learners: int
    average_every: int = 8
    timeout_s: float = 1.5
    overlap: int = 0

    def __post_init__(self) -> None:
        for name in ("learners", "average_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} must be a whole number of at least 1; found {value!r}.")
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ConfigurationError(f"timeout_s must be a number of seconds above 0; found {self.timeout_s!r}.")
        check_overlap(self.overlap, self.average_every)
