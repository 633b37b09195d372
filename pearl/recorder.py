"""Times of the parts of one thread's work: seconds in all, and the newest as events for a trace."""

from __future__ import annotations

import time
from collections import deque
from typing import TypeAlias

Event: TypeAlias = tuple[str, float, float]  # part, start and end in seconds of time.perf_counter()


class Recorder:
    """Adds up the seconds of each part; one thread records, any thread may read `spent`.

    `parts` are listed with 0 seconds from the start; others follow when they are recorded.
    """

    def __init__(self, *parts: str) -> None:
        self.spent = dict.fromkeys(parts, 0.0)
        self._events: deque[Event] | None = None
        self._now = 0.0

    def record(self, part: str, start: float, end: float) -> None:
        """`part` took from `start` to `end`, in seconds of `time.perf_counter()`."""
        self.spent[part] = self.spent.get(part, 0.0) + end - start
        if self._events is not None:
            self._events.append((part, start, end))

    def begin(self) -> None:
        """A part begins now."""
        self._now = time.perf_counter()

    def end(self, part: str) -> None:
        """What ran since `begin`, or since the last `end`, was `part`."""
        start, self._now = self._now, time.perf_counter()
        self.record(part, start, self._now)

    def keep_events(self, most: int) -> None:
        """Keep the newest `most` events from now on; at first none are kept."""
        self._events = deque(maxlen=most)

    def events(self) -> list[Event]:
        """The events kept, oldest first; call it when the thread has ended."""
        return list(self._events or ())
