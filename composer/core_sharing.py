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

        The slower of Learner and Actors, or longer where the cores are too few for the work of both. Several threads
        wait for the last of them, which shares its core with Actors: those have their work on it done before the next.
        """
        collect_us = 0.0 if math.isinf(self.collect_us) else self.collect_us
        if threads > 1:
            return max(step_us + self._on_one_core(threads) * collect_us, collect_us)
        return max(step_us, collect_us, (step_us + collect_us * self._parallel) / self.cores)

    def rank(self, step_us: float, threads: int) -> float:
        """What a Learner's count of threads is chosen by, the least being the best: `iteration_us`, with a margin."""
        crowded = threads + self._parallel > self.cores
        return self.iteration_us(step_us, threads) * (_CROWDED if crowded else 1.0)

    def keeps_up(self, step_us: float, threads: int) -> bool:
        """Whether the Actors are what such a Learner waits for: no more threads make an iteration shorter."""
        return math.isfinite(self.collect_us) and self.iteration_us(step_us, threads) <= self.collect_us

    def has_idle_core(self, threads: int) -> bool:
        """Whether a Learner of `threads` threads and the Actors leave a core."""
        return threads + self.actors < self.cores

    def step_us(self, step_us: float, threads: int) -> float:
        """Microseconds that a step takes beside the Actors, of one that alone takes `step_us` on `threads` threads.

        One thread gets as much of the cores as each Actor; no Actor does more than it may. Of several threads the last
        one counts, and as long as a scheduler lets an Actor run there, the others wait.
        """
        if threads > 1:
            return step_us + self._on_one_core(threads) * min(self.collect_us, step_us)
        actors_us = min(self.collect_us * self._parallel, step_us * self.actors)
        return max(step_us, (step_us + actors_us) / self.cores)

    def _on_one_core(self, threads: int) -> int:
        """The most Actors that have to share a core with a thread of the Learner's."""
        return math.ceil(max(0, threads + self._parallel - self.cores) / threads)

    @property
    def _parallel(self) -> int:
        return min(self.actors, self.cores)
