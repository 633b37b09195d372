"""Gradient steps per second."""

from __future__ import annotations

import time
from collections import deque

_WINDOW_S = 2.0


class StepRate:
    """Counts steps against two clocks: wall time, and the time during which a batch was in flight.

    The composer predicts the second: it excludes the waits for data that the replay ratio causes. `timed_steps` are
    those that the second clock saw from their beginning. `first_end` is when the first step of all was done, by
    `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.first_end: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all steps, but not when the first one was done."""
        self.steps = self.timed_steps = 0
        self._first: float | None = None
        self._last = 0.0
        self._window: deque[tuple[float, int]] = deque()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._whole = True

    def started(self, *, whole: bool = True) -> None:
        """A batch is under way (again). If it began before and is not `whole`, the second clock leaves it out."""
        now = time.monotonic()
        if self._first is None:
            self._first = self._last = now
            self._window.append((now, 0))
        if self._busy_since is None:
            self._busy_since, self._whole = now, whole

    def trained(self, steps: int, *, idle: bool, busy_s: float | None = None) -> None:
        """`steps` are done; `idle`: nothing else is under way.

        `busy_s` are the seconds that they took without waits for data, if the Learners have counted them.
        """
        now = self._last = time.monotonic()
        if self.first_end is None:
            self.first_end = now
        self.steps += steps
        if busy_s is not None:
            self._busy_s += busy_s
            self.timed_steps += steps
        elif self._busy_since is not None:
            if self._whole:
                self._busy_s += now - self._busy_since
                self.timed_steps += steps
            self._busy_since, self._whole = None if idle else now, True
        self._window.append((now, self.steps))
        while len(self._window) > 2 and now - self._window[0][0] > _WINDOW_S:
            self._window.popleft()

    @property
    def last(self) -> float:
        """When the last steps were done, in seconds of `time.monotonic()`."""
        return self._last

    @property
    def since(self) -> float | None:
        """The time of the first batch, by `time.monotonic`; None before it."""
        return self._first

    @property
    def busy_s(self) -> float:
        """Seconds in which a batch was under way, up to the last steps."""
        return self._busy_s

    @property
    def total_s(self) -> float:
        """Seconds since the first batch."""
        return 0.0 if self._first is None else self._last - self._first

    @property
    def recent(self) -> float:
        """Steps per second of wall time over the last two seconds."""
        if len(self._window) < 2:
            return 0.0
        (start, before), (end, after) = self._window[0], self._window[-1]
        return (after - before) / (end - start) if end > start else 0.0

    @property
    def overall(self) -> float:
        """Steps per second of wall time since the first batch."""
        return self.steps / self.total_s if self.total_s > 0 else 0.0

    @property
    def busy(self) -> float:
        """Steps per second of the time in which a batch was under way; `overall` where none was seen whole."""
        return self.timed_steps / self._busy_s if self._busy_s > 0 else self.overall
