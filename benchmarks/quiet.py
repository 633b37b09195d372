"""Turns of a measurement that no neighbour disturbs.

A shared machine may run another's thread on the same core. A kernel then takes up to three times as long, and one that
uses all of a core's units is slowed more than one that waits for other things. So a turn, which is of all contenders,
is repeated unless a probe, which is none of them, takes about its least time before and after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from benchmarks.timing import microseconds

T = TypeVar("T")

TOLERANCE = (
    1.25  # of the probe's least time; quiet times are within a tenth of each other, disturbed ones twice as long
)
PROBE_S = 5e-3
PAUSE_S = 0.02  # between probes; a core that idles is given to others


class Quiet:
    """Repeats disturbed turns, for `limit_s` in all; later turns count as they are. First it looks for `first_s`."""

    def __init__(
        self,
        probe: Callable[[], object],
        limit_s: float,
        first_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.turns = self.disturbed = 0
        self.repeated_s = 0.0
        self._probe, self._limit_s, self._clock, self._sleep = probe, limit_s, clock, sleep
        probe()
        self._calls = max(1, round(PROBE_S * 1e6 / max(microseconds(probe, 3), 1e-3)))
        self._least = float("inf")
        end = clock() + first_s
        while clock() < end:
            self.is_quiet()
            sleep(PAUSE_S)

    def is_quiet(self) -> bool:
        """Whether the probe takes about the least time it has ever taken."""
        took = microseconds(self._probe, self._calls)
        self._least = min(self._least, took)
        return took <= TOLERANCE * self._least

    def turn(self, take: Callable[[], T]) -> T:
        """What `take` returns in a turn that is quiet before and after it, or, at the limit, in any turn."""
        self.turns += 1
        while True:
            start = self._clock()
            while not (quiet := self.is_quiet()) and self.repeated_s + self._clock() - start < self._limit_s:
                self._sleep(PAUSE_S)
            self.repeated_s += self._clock() - start
            start = self._clock()
            found = take()
            if quiet and self.is_quiet():
                return found
            if self.repeated_s >= self._limit_s:
                self.disturbed += 1
                return found
            self.repeated_s += self._clock() - start

    def __str__(self) -> str:
        return (
            f"{self.turns} turns, {self.disturbed} of them disturbed by a neighbour on the core; "
            f"{self.repeated_s:.0f} s waited, or repeated."
        )
