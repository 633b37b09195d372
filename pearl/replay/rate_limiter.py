"""Limits the ratio of samples drawn to items inserted: the side that is ahead waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pearl.errors import ConfigurationError, QueueClosedError, QueueTimeoutError

_SLICE_S = 0.1  # the longest uninterruptible wait, so that Ctrl-C works


@dataclass(frozen=True)
class RateLimiterStatistics:
    """Counts since the start, and the time spent waiting; `diff` is `inserted * samples_per_insert - sampled`."""

    inserted: int
    sampled: int
    diff: float
    insert_waits: int
    sample_waits: int
    insert_waited_s: float
    sample_waited_s: float
    insert_timeouts: int
    sample_timeouts: int


class RateLimiter:
    """Allows insertion and sampling while `min_diff <= inserted * samples_per_insert - sampled <= max_diff`.

    The rules are those of Reverb's RateLimiter (Cassirer et al. 2021). Until `min_size` items are inserted, any
    insertion is allowed and no sampling. After that, n items may be inserted if the difference stays at most
    `max_diff`, and n items may be sampled if it stays at least `min_diff`. Both wait with a timeout, and count the
    items that they allow. Any thread may call any method; waiting threads see a new configuration at once.

    The bounds are `samples_per_insert * min_size` minus and plus `error_buffer`; a pair is the buffer below and above.
    With an infinite buffer, sampling only waits for `min_size`.
    """

    def __init__(
        self, samples_per_insert: float, min_size: int = 1, error_buffer: float | tuple[float, float] = math.inf
    ) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._inserted = self._sampled = 0
        self._waits = {"insert": 0, "sample": 0}
        self._waited_s = {"insert": 0.0, "sample": 0.0}
        self._timeouts = {"insert": 0, "sample": 0}
        self._configure(samples_per_insert, min_size, error_buffer)

    @property
    def samples_per_insert(self) -> float:
        """Samples drawn per item inserted, on average."""
        return self._ratio

    @property
    def min_size(self) -> int:
        """Items that must be inserted before the first sampling."""
        return self._min_size

    @property
    def bounds(self) -> tuple[float, float]:
        """`(min_diff, max_diff)`."""
        return self._min_diff, self._max_diff

    def reconfigure(
        self,
        *,
        samples_per_insert: float | None = None,
        min_size: int | None = None,
        error_buffer: float | tuple[float, float] | None = None,
    ) -> None:
        """Change the given settings and keep the others and the counts; threads that may now continue are woken.

        Raises ConfigurationError, changing nothing, for values that the constructor would refuse.
        """
        with self._changed:
            self._configure(
                self._ratio if samples_per_insert is None else samples_per_insert,
                self._min_size if min_size is None else min_size,
                self._buffer if error_buffer is None else error_buffer,
            )
            self._changed.notify_all()

    def can_insert(self, count: int = 1) -> bool:
        """Whether `count` items may be inserted now; does not wait and counts nothing."""
        _check_count(count)
        with self._changed:
            return self._may_insert(count)

    def can_sample(self, count: int = 1) -> bool:
        """Whether `count` items may be sampled now; does not wait and counts nothing."""
        _check_count(count)
        with self._changed:
            return self._may_sample(count)

    def await_insert(self, count: int = 1, timeout_s: float = 1.0) -> None:
        """Wait until `count` items may be inserted, and count them.

        Raises QueueTimeoutError, counting nothing, if that takes longer than `timeout_s`, and QueueClosedError if the
        limiter is closed.
        """
        _check_count(count)
        with self._changed:
            self._wait("insert", count, timeout_s, self._may_insert)
            self._inserted += count
            self._changed.notify_all()

    def await_sample(self, count: int = 1, timeout_s: float = 1.0) -> None:
        """Wait until `count` items may be sampled, and count them; raises as `await_insert`."""
        _check_count(count)
        with self._changed:
            self._wait("sample", count, timeout_s, self._may_sample)
            self._sampled += count
            self._changed.notify_all()

    def statistics(self) -> RateLimiterStatistics:
        """Return the counts, all of one moment."""
        with self._changed:
            return RateLimiterStatistics(
                inserted=self._inserted,
                sampled=self._sampled,
                diff=self._diff(0, 0),
                insert_waits=self._waits["insert"],
                sample_waits=self._waits["sample"],
                insert_waited_s=self._waited_s["insert"],
                sample_waited_s=self._waited_s["sample"],
                insert_timeouts=self._timeouts["insert"],
                sample_timeouts=self._timeouts["sample"],
            )

    def restore(self, *, inserted: int, sampled: int) -> None:
        """Continue from saved counts."""
        _check_count(inserted)
        _check_count(sampled)
        with self._changed:
            self._inserted, self._sampled = inserted, sampled
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; every wait then raises QueueClosedError. May be repeated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _configure(self, ratio: float, min_size: int, error_buffer: float | tuple[float, float]) -> None:
        if not 0 < ratio < math.inf:
            raise ConfigurationError(f"samples_per_insert must be a number above 0; found {ratio!r}.")
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
            raise ConfigurationError(f"min_size must be a whole number of at least 1; found {min_size!r}.")
        below, above = error_buffer if isinstance(error_buffer, tuple) else (error_buffer, error_buffer)
        least = max(1.0, ratio)  # a smaller buffer deadlocks
        if not (below >= 0 and above >= 0 and below + above >= 2 * least):
            raise ConfigurationError(
                f"error_buffer must be at least {least:g}, the larger of 1 and samples_per_insert, or both sides would "
                f"wait for each other; found {error_buffer!r}."
            )
        self._ratio, self._min_size, self._buffer = float(ratio), min_size, error_buffer
        self._min_diff, self._max_diff = ratio * min_size - below, ratio * min_size + above

    def _diff(self, inserted: int, sampled: int) -> float:
        return (self._inserted + inserted) * self._ratio - (self._sampled + sampled)

    def _may_insert(self, count: int) -> bool:
        return self._inserted + count <= self._min_size or self._diff(count, 0) <= self._max_diff

    def _may_sample(self, count: int) -> bool:
        return self._inserted >= self._min_size and self._diff(0, count) >= self._min_diff

    def _wait(
        self, side: Literal["insert", "sample"], count: int, timeout_s: float, allowed: Callable[[int], bool]
    ) -> None:
        """Wait, holding the lock, until `allowed(count)`."""
        if not self._closed and allowed(count):
            return
        start = time.monotonic()
        self._waits[side] += 1
        try:
            while not self._closed and not allowed(count):
                left = start + timeout_s - time.monotonic()
                if left <= 0:
                    self._timeouts[side] += 1
                    raise QueueTimeoutError(self._complaint(side, count, timeout_s))
                self._changed.wait(min(left, _SLICE_S))
        finally:
            self._waited_s[side] += time.monotonic() - start
        if self._closed:
            raise QueueClosedError(f"The rate limiter was closed while {_GERUND[side]} waited.")

    def _complaint(self, side: Literal["insert", "sample"], count: int, timeout_s: float) -> str:
        who = f"{_GERUND[side]} {count} items waited {timeout_s:g} s for"
        state = f"{self._inserted} items inserted and {self._sampled} sampled, {self._ratio:g} samples per insert"
        if side == "sample" and self._inserted < self._min_size:
            return f"{who} insertion: {self._min_size} items must be inserted first; found {self._inserted}."
        bound = (
            f"the difference would fall to {self._diff(0, count):g}, below {self._min_diff:g}"
            if side == "sample"
            else f"the difference would rise to {self._diff(count, 0):g}, above {self._max_diff:g}"
        )
        other = "insertion" if side == "sample" else "sampling"
        return (
            f"{who} {other} to catch up: with {state}, {bound}. "
            f"Is {other} still running? Otherwise widen error_buffer, or insert and sample fewer items at once."
        )


_GERUND = {"insert": "Inserting", "sample": "Sampling"}


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigurationError(f"A count of items must be a whole number of at least 0; found {count!r}.")
