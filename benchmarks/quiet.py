"""Turns of a measurement that no neighbour disturbs.

A shared machine may run another's thread on the same core. A kernel then takes up to three times as long, and one that
uses all of a core's units is slowed more than one that waits for other things. So a turn, which is of all contenders,
is repeated unless a probe, which is none of them, takes about its least time before and after it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from benchmarks.timing import microseconds

T = TypeVar("T")

TOLERANCE = 1.4  # of the least time: a quiet core takes up to a third longer, a disturbed one 1.6 to 3 times as long
PROBE_S = 5e-3
STAY_S = 5.0  # on a core: a host gives a thread that runs on and on a quieter place
SAID_S = 10.0  # between messages while it waits
PAUSE_S = 0.02  # between probes; a core that idles is given to others


def move(*cores: int) -> None:
    """Move all threads of this process, and of those it has started, to these cores."""
    ended = suppress(FileNotFoundError, ProcessLookupError)
    processes = [os.getpid()]
    for process in processes:
        with ended:
            for thread in list(Path(f"/proc/{process}/task").iterdir()):
                with ended:
                    os.sched_setaffinity(int(thread.name), cores)
                    processes += map(int, (thread / "children").read_text(encoding="ascii").split())


def own_cores() -> list[int]:
    """The cores that this process may use; none where it cannot move the processes that it has started."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return []
    return sorted(os.sched_getaffinity(0))


class Quiet:
    """Repeats disturbed turns, for `limit_s` in all; later turns count as they are. First it looks for `first_s`.

    All contenders run on one of `cores`, and move to the next one when a neighbour stays.
    """

    def __init__(
        self,
        probe: Callable[[], object],
        limit_s: float,
        first_s: float = 10.0,
        cores: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.turns = self.disturbed = 0
        self.repeated_s = 0.0
        self._probe, self._limit_s, self._clock, self._sleep = probe, limit_s, clock, sleep
        self._cores, self._at, self._moved = list(cores), 0, clock()
        if self._cores:
            move(self._cores[0])
        probe()
        self._calls = max(1, round(PROBE_S * 1e6 / max(microseconds(probe, 3), 1e-3)))
        self._least = float("inf")
        end = clock() + first_s
        while clock() < end:
            if not self.is_quiet():
                self._pause()

    def is_quiet(self) -> bool:
        """Whether the probe takes about the least time it has ever taken."""
        self._took = microseconds(self._probe, self._calls)
        self._least = min(self._least, self._took)
        return self._took <= TOLERANCE * self._least

    def _pause(self) -> None:
        self._sleep(PAUSE_S)
        if len(self._cores) > 1 and self._clock() - self._moved > STAY_S:
            self._at, self._moved = (self._at + 1) % len(self._cores), self._clock()
            move(self._cores[self._at])

    def turn(self, take: Callable[[], T]) -> T:
        """What `take` returns in a turn that is quiet before and after it, or, at the limit, in any turn."""
        self.turns += 1
        while True:
            start = self._clock()
            said = start
            while not (quiet := self.is_quiet()) and self.repeated_s + self._clock() - start < self._limit_s:
                if self._clock() - said > SAID_S:
                    said = self._clock()
                    print(f"waiting: the probe takes {self._took:.1f} us, at least {self._least:.1f}", file=sys.stderr)
                self._pause()
            self.repeated_s += self._clock() - start
            start = self._clock()
            found = take()
            if quiet and self.is_quiet():
                return found
            if self.repeated_s >= self._limit_s:
                self.disturbed += 1
                return found
            self.repeated_s += self._clock() - start

    def end(self) -> None:
        """Run on all cores again."""
        if self._cores:
            move(*self._cores)

    def __str__(self) -> str:
        return (
            f"{self.turns} turns, {self.disturbed} of them disturbed by a neighbour on the core; "
            f"{self.repeated_s:.0f} s waited, or repeated."
        )
