"""Power meters: energy counters of devices."""

from __future__ import annotations

from typing import Protocol


class PowerMeter(Protocol):
    """The energy counter of one piece of silicon; used from one thread.

    A counter counts the whole silicon, whatever runs there: other programs on it are included.
    """

    @property
    def source(self) -> str:
        """The counter's name, such as "RAPL"."""
        ...

    @property
    def counter(self) -> str:
        """The name of this very counter: two devices with one name are counted together."""
        ...

    @property
    def most_seconds(self) -> float:
        """The longest time between two calls of `joules` that loses nothing; infinity where no counter wraps around."""
        ...

    def joules(self) -> float:
        """Joules since the meter was made; DeviceError if the counter can no longer be read."""
        ...


class WrappingCounter:
    """Adds up a counter that starts again at 0 after its largest value.

    `values` is how many values the counter has: the largest one plus 1. Two updates must be at most one round apart.
    """

    def __init__(self, first: int, values: int) -> None:
        self._last, self._values = first, values
        self.total = 0

    def update(self, now: int) -> None:
        """Add what was counted since the last update."""
        self.total += (now - self._last) % self._values
        self._last = now
