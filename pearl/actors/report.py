"""A process's report to the process that started it: signs of life, a result, or why it failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pearl.ipc.shared_buffer import SharedBuffer

LONGEST_GAP_S = 1.0  # counted as silence between two looks: the reader may have been busy or suspended
_MOST_BYTES = 32 * 1024  # of a failure's text: longer than useful tracebacks
_BEATS, _READY, _FAILED, _LENGTH, _NUMBERS = range(5)
_HEADER_BYTES = 8 * (_NUMBERS + 1)


class Report:
    """One writer, one reader, in shared memory: writing never waits, and the content outlives the writer.

    Not a pipe: a long text would fill it, and a child of the writer would hold its end open. `most_numbers` is how many
    floats `deliver` may write.
    """

    def __init__(self, most_numbers: int = 0) -> None:
        self._attach(most_numbers, SharedBuffer(_HEADER_BYTES + 8 * most_numbers + _MOST_BYTES))

    def _attach(self, most_numbers: int, buffer: SharedBuffer) -> None:
        self._most_numbers, self._buffer = most_numbers, buffer
        self._header = np.frombuffer(buffer.memory, np.int64, _NUMBERS + 1)
        self._numbers = np.frombuffer(buffer.memory, np.float64, most_numbers, _HEADER_BYTES)
        self._text = np.frombuffer(buffer.memory, np.uint8, _MOST_BYTES, _HEADER_BYTES + 8 * most_numbers)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._most_numbers, self._buffer

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._attach(*state)

    # --- the writer -------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Give a sign of life."""
        self._header[_BEATS] += 1

    def ready(self) -> None:
        """Say that everything was made and the work begins."""
        self._header[_READY] = 1
        self.beat()

    def deliver(self, numbers: Sequence[float]) -> None:
        """Write the result."""
        self._numbers[: len(numbers)] = numbers
        self._header[_NUMBERS] = len(numbers)

    def fail(self, text: str) -> None:
        """Say why the writer ends; a long text keeps its beginning and end."""
        encoded = shortened(text, _MOST_BYTES).encode(errors="replace")
        self._text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._header[_LENGTH] = len(encoded)
        self._header[_FAILED] = 1

    # --- the reader -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all, for another writer."""
        self._header[:] = 0

    @property
    def beats(self) -> int:
        """Signs of life so far."""
        return int(self._header[_BEATS])

    @property
    def is_ready(self) -> bool:
        """Whether the work has begun."""
        return bool(self._header[_READY])

    @property
    def result(self) -> list[float] | None:
        """The numbers of `deliver`; None if there are none."""
        count = int(self._header[_NUMBERS])
        return self._numbers[:count].tolist() if count else None

    @property
    def failure(self) -> str | None:
        """The text of `fail`; None if it was not called."""
        if not self._header[_FAILED]:
            return None
        return bytes(self._text[: int(self._header[_LENGTH])]).decode(errors="replace")


class Beating(Protocol):
    """What gives signs of life, such as the writer of a `Report`."""

    @property
    def beats(self) -> int:
        """A number that changes with each."""


class Silence:
    """How long something has given no sign of life, as whoever listens finds when it looks."""

    def __init__(self, source: Beating) -> None:
        self._source, self._beats = source, -1
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.seconds, self._looked_at = 0.0, time.monotonic()

    def look(self) -> float:
        """The seconds of silence so far; 0 after a sign of life since the last look."""
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        beats = self._source.beats
        self.seconds = self.seconds + min(passed_s, LONGEST_GAP_S) if beats == self._beats else 0.0
        self._beats = beats
        return self.seconds


def shortened(text: str, most_bytes: int) -> str:
    """`text` in at most `most_bytes` bytes of UTF-8: its beginning, how much is left out, and its end."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= most_bytes:
        return text
    kept = (most_bytes - 100) // 2
    first, last = (part.decode(errors="ignore") for part in (encoded[:kept], encoded[-kept:]))
    return f"{first}\n... ({len(encoded) - 2 * kept:,} bytes are left out here) ...\n{last}"
