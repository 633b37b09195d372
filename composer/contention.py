"""How much Actors and the other primitives slow each other down where they share the cores of one CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

# More threads than cores wait for each other longer than their work explains, and longer still on a busy machine. They
# are chosen only where they gain more than this factor.
_OVERSUBSCRIPTION_MARGIN = 1.1


@dataclass(frozen=True)
class CoreSharing:
    """A CPU with `cores` cores on which `actors` processes collect transitions for a Learner.

    `collect_us` is the time that the Actors need, on cores of their own, to collect the transitions for one iteration
    of the Learner. Actors that are faster wait for the Learner. Infinity: they never wait.

    Several `learners` make their steps side by side, and an iteration is a step of each. `limit` is the most threads
    of one where other nodes have fewer cores; 0: none.
    """

    cores: int
    actors: int
    collect_us: float
    learners: int = 1
    limit: int = 0

    @property
    def most_threads(self) -> int:
        """The most threads for a Learner: all cores where Actors wait for it, else the cores without an Actor."""
        cores = self.cores - self.actors if math.isinf(self.collect_us) else self.cores
        most = max(1, cores // self.learners)
        return min(most, self.limit) if self.limit else most

    def iteration_us(self, step_us: float, threads: int) -> float:
        """Microseconds of one iteration; a step without Actors takes `step_us` on `threads` threads.

        The slower of Learner and Actors decides, or the cores where there are too few for the work of both. Several
        threads wait for the last one, which shares its core with Actors; these finish their work there first.
        """
        collect_us = 0.0 if math.isinf(self.collect_us) else self.collect_us
        if threads > 1:
            return max(step_us + self._actors_per_core(threads) * collect_us, collect_us)
        work_us = self.learners * step_us + collect_us * self._running_actors
        return max(step_us, collect_us, work_us / self.cores)

    def rank(self, step_us: float, threads: int) -> float:
        """The measure by which a count of threads is chosen, lowest first: `iteration_us` with a margin."""
        oversubscribed = self.learners * threads + self._running_actors > self.cores
        return self.iteration_us(step_us, threads) * (_OVERSUBSCRIPTION_MARGIN if oversubscribed else 1.0)

    def keeps_up(self, step_us: float, threads: int) -> bool:
        """Whether this Learner waits for the Actors, so that more threads cannot shorten an iteration."""
        return math.isfinite(self.collect_us) and self.iteration_us(step_us, threads) <= self.collect_us

    def has_idle_core(self, threads: int) -> bool:
        """Whether a core is free next to a Learner of `threads` threads and the Actors."""
        return self.learners * threads + self.actors < self.cores

    def step_us(self, step_us: float, threads: int) -> float:
        """Microseconds of a step while the Actors run; without them it takes `step_us` on `threads` threads.

        One thread gets as much of the cores as each Actor, and no Actor does more work than it is allowed. Several
        threads wait for the last one as long as an Actor runs on its core.
        """
        if threads > 1:
            return step_us + self._actors_per_core(threads) * min(self.collect_us, step_us)
        actors_us = min(self.collect_us * self._running_actors, step_us * self.actors)
        return max(step_us, (self.learners * step_us + actors_us) / self.cores)

    def _actors_per_core(self, threads: int) -> int:
        """The most Actors that share a core with one of the Learner's threads."""
        threads *= self.learners
        return math.ceil(max(0, threads + self._running_actors - self.cores) / threads)

    @property
    def _running_actors(self) -> int:
        return min(self.actors, self.cores)
