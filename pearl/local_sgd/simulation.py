"""How local SGD scales: rounds of several Learners, simulated from the phases that one machine measured.

A round is H gradient steps of each of L Learners, whose slowest all others wait for, and an average (thesis Eq. 5.5).
The thesis's scaling factor (Eq. 5.6) takes every step to last as long as the mean, and so leaves the wait out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pearl.errors import ConfigurationError
from pearl.spec import check_overlap

Topology = Literal["server", "ring"]
_BITS = 32  # of a parameter


@dataclass(frozen=True)
class Phases:
    """Measured times of one Learner and of averages, in microseconds.

    `step_us` are single gradient steps in the order in which they were made: neighbours are drawn together, since a
    slow time lasts for several steps. An average of L Learners takes `average_us + average_us_each * L`, in shared
    memory, from the last one that hands in. `round_us` is each Learner's own work for an average: it hands in and
    loads, which no overlap hides.
    """

    step_us: np.ndarray
    average_us: float = 0.0
    average_us_each: float = 0.0
    round_us: float = 0.0

    def __post_init__(self) -> None:
        steps = np.asarray(self.step_us, np.float64)
        if steps.ndim != 1 or not len(steps) or not np.all(np.isfinite(steps)) or np.any(steps <= 0):
            raise ConfigurationError(
                f"step_us must be one or more times above 0 in a row; found an array of shape {steps.shape}."
            )
        object.__setattr__(self, "step_us", steps)
        for name in ("average_us", "average_us_each", "round_us"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigurationError(f"{name} must be a time of at least 0; found {getattr(self, name)!r}.")


@dataclass(frozen=True)
class Network:
    """A network between Learners on machines of their own, in place of shared memory.

    `parameters` float32 go to a server, whose link of `gbps` gigabits a second all share, and come back; or around a
    ring of all Learners ("ring"), in 2 (L - 1) parts of 1 / L each. Every message takes `latency_us` besides.
    """

    parameters: int
    gbps: float
    latency_us: float
    topology: Topology = "server"

    def __post_init__(self) -> None:
        if self.parameters < 1 or not self.gbps > 0 or not self.latency_us >= 0:
            raise ConfigurationError(
                "A network needs parameters of at least 1, gbps above 0 and latency_us of at least 0; found "
                f"{self.parameters}, {self.gbps} and {self.latency_us}."
            )
        if self.topology not in ("server", "ring"):
            raise ConfigurationError(f'topology must be "server" or "ring"; found {self.topology!r}.')

    def average_us(self, learners: int) -> float:
        """Microseconds of one average between `learners`."""
        if learners == 1:
            return 0.0
        whole_us = self.parameters * _BITS / (self.gbps * 1e3)
        if self.topology == "ring":
            return 2 * (learners - 1) * (whole_us / learners + self.latency_us)
        return 2 * (learners * whole_us + self.latency_us)


@dataclass(frozen=True)
class Scaling:
    """Result of a simulation: gradient steps of all Learners a second, and the shares (of 1) of a Learner's time.

    `efficiency` is the rate over L times that of one Learner that never averages.
    """

    learners: int
    average_every: int
    steps_per_s: float
    efficiency: float
    training: float
    waiting: float
    averaging: float

    @property
    def limit(self) -> str:
        """The largest cause of lost time."""
        if self.efficiency > 0.98:
            return "nothing yet"
        return "stragglers" if self.waiting > self.averaging else "averaging"


def simulate(
    phases: Phases,
    learners: int,
    average_every: int,
    *,
    network: Network | None = None,
    cores: int | None = None,
    overlap: int = 0,
    scales: Sequence[float] | None = None,
    rounds: int = 2000,
    seed: int = 0,
) -> Scaling:
    """Let `learners` make `rounds` times `average_every` steps, and average after each.

    On one machine with `cores`, more Learners than those share them evenly, whichever of them have work; an average
    that overlaps with steps takes its part, too. Learners make `overlap` steps of the next round before they wait for
    an average (`AveragingSpec.overlap`). The steps of each Learner take `scales` times as long as those measured,
    where these are given: cores differ. `efficiency` is then over Learners that all take one.
    """
    for name, value in (("learners", learners), ("average_every", average_every), ("rounds", rounds)):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1; found {value}.")
    check_overlap(overlap, average_every)
    if scales is not None and (len(scales) != learners or not all(0 < scale < np.inf for scale in scales)):
        raise ConfigurationError(f"scales must be {learners} numbers above 0, one for each Learner; found {scales!r}.")
    rng = np.random.default_rng(seed)
    average_us = phases.average_us + phases.average_us_each * learners
    if network is not None:
        average_us = network.average_us(learners)
    drawn = rng.integers(len(phases.step_us), size=(rounds, learners))
    factors = np.ones(learners) if scales is None else np.asarray(scales, np.float64)
    first = _sums_of(phases.step_us, overlap)[drawn] * factors
    rest = _sums_of(phases.step_us, average_every)[drawn] * factors - first + phases.round_us
    if cores is None or learners <= cores:
        spent, waited, total = _on_own_cores(first, rest, average_us, takes_last=not overlap)
    else:
        spent, waited, total = _on_shared_cores(first, rest, average_us, cores, takes_last=not overlap)
    steps_per_s = learners * average_every * rounds / total * 1e6
    mean_us = float(phases.step_us.mean())
    alone = min(learners, cores or learners) / mean_us * 1e6
    on_steps = 1.0 - phases.round_us / (phases.round_us + average_every * mean_us * float(factors.mean()))
    training, waiting = spent / total * on_steps, waited / total
    return Scaling(
        learners, average_every, steps_per_s, steps_per_s / alone, training, waiting,
        max(0.0, 1.0 - training - waiting),
    )  # fmt: skip


def _on_own_cores(
    first: np.ndarray, rest: np.ndarray, average_us: float, *, takes_last: bool
) -> tuple[float, float, float]:
    """Microseconds of work and of waiting for the slowest, means of the Learners, and of all rounds.

    `first` and `rest` `(rounds, learners)` are its work before and after a Learner needs the last average. With
    `takes_last`, the end is that of the last average.
    """
    now = np.zeros(first.shape[1])  # of each Learner
    slowest = ready = waited = 0.0  # when all had handed in for the last average, and when it was there
    for before, after in zip(first, rest, strict=True):
        now += before
        waited += float(np.maximum(0.0, slowest - now).mean())
        now = np.maximum(now, ready) + after
        slowest = float(now.max())
        ready = slowest + average_us
    waited += float((slowest - now).mean())
    return float((first.sum() + rest.sum()) / len(now)), waited, ready if takes_last else slowest


def _on_shared_cores(
    first: np.ndarray, rest: np.ndarray, average_us: float, cores: int, *, takes_last: bool
) -> tuple[float, float, float]:
    """The same where Learners and the averaging share fewer cores.

    From one event to the next, each that has work gets as much time as the others.
    """
    rounds, learners = first.shape
    left = np.append(first[0], np.inf)  # microseconds of work, the averaging's at the end
    has_work = np.append(np.ones(learners, np.bool_), False)
    needs_average = np.ones(learners, np.bool_)  # before its next steps: it makes those of `first`
    made = np.zeros(learners, np.int64)  # rounds
    averages = handed_in = 0
    now = spent = waited = 0.0
    while made.min() < rounds or (takes_last and averages < rounds):
        pace = min(1.0, cores / int(has_work.sum()))
        passed = float(left[has_work].min()) / pace
        now += passed
        spent += passed * int(has_work[:-1].sum())
        waited += 0.0 if has_work[-1] else passed * int(learners - has_work[:-1].sum())
        left[has_work] -= passed * pace
        done = has_work & (left <= 1e-9 * now)
        has_work &= ~done
        if done[-1]:
            averages += 1
        for learner in np.flatnonzero(done[:-1] & ~needs_average):
            made[learner] += 1
            handed_in += 1
            if made[learner] < rounds:
                needs_average[learner] = has_work[learner] = True
                left[learner] = first[made[learner], learner]
        if handed_in == learners:
            handed_in, left[-1], has_work[-1] = 0, average_us, True
        ready = needs_average & ~has_work[:-1] & (made <= averages)
        needs_average &= ~ready
        for learner in np.flatnonzero(ready):
            left[learner], has_work[learner] = rest[made[learner], learner], True
    return spent / learners, waited / learners, now


def _sums_of(step_us: np.ndarray, count: int) -> np.ndarray:
    """Microseconds of `count` steps in a row, from each of the measured ones on; after the last comes the first."""
    around = np.concatenate([[0.0], np.cumsum(np.resize(step_us, len(step_us) + count))])
    sums: np.ndarray = around[count : count + len(step_us)] - around[: len(step_us)]
    return sums
