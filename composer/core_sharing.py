"""What the Learner and the Actors take from each other where they share the cores of one CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Threads that share cores with others wait for each other longer than their work says: the more so, the busier the
# machine is with yet other things. What they are predicted to gain must be worth that.
_CROWDED = 1.1


@dataclass(frozen=True)
class CoreSharing:
    """A CPU of `cores` on which `actors` processes collect for a Learner.

    `collect_us` is in how many microseconds these, on cores of their own, collect the transitions that one iteration of
    the Learner may train on: they wait for the Learner when they are faster. Infinity: they never wait.
    """

    cores: int
    actors: int
    collect_us: float

    @property
    def most_threads(self) -> int:
        """How many threads a Learner may have: all cores where Actors wait for it, else those that they leave."""
        return max(1, self.cores - self.actors) if math.isinf(self.collect_us) else self.cores

    def iteration_us(self, step_us: float, threads: int) -> float:
        """Microseconds from one iteration to the next, of steps that alone take `step_us` on `threads` threads.

        The slower of Learner and Actors, or longer where the cores are too few for the work of both.
        """
        collect_us = 0.0 if math.isinf(self.collect_us) else self.collect_us
        work_us = step_us * threads + collect_us * self._parallel
        return max(step_us, collect_us, work_us / self.cores)

    def rank(self, step_us: float, threads: int) -> float:
        """What a Learner's count of threads is chosen by, the least being the best: `iteration_us`, with a margin."""
        crowded = threads + self._parallel > self.cores
        return self.iteration_us(step_us, threads) * (_CROWDED if crowded else 1.0)

    def keeps_up(self, step_us: float, threads: int) -> bool:
        """Whether the Actors are what such a Learner waits for: no more threads make an iteration shorter."""
        return math.isfinite(self.collect_us) and self.iteration_us(step_us, threads) <= self.collect_us

    def step_us(self, step_us: float, threads: int) -> float:
        """Microseconds that a step takes beside the Actors, of one that alone takes `step_us` on `threads` threads.

        Each thread and Actor that wants to run gets an equal part of the cores; no Actor does more than it may.
        """
        actors_us = min(self.collect_us * self._parallel, step_us * self.actors)
        return max(step_us, (step_us * threads + actors_us) / self.cores)

    @property
    def _parallel(self) -> int:
        return min(self.actors, self.cores)
