"""Signals that ask a run to stop: a handler notes them, and the run checks for them."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SAME_INTERRUPT_S = 1.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals to handle: none in a thread other than the main one, where Python allows no handlers.

    SIGHUP stays ignored under `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    return tuple(s for s in STOP_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit inside the `with` block, which ends child processes and removes folders.

    The exit code is 128 + the signal's number. Only in the main thread, and not for a signal that is ignored or has a
    handler.
    """
    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    handled = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for each in handled:  # a further signal must not interrupt the end
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


class Interruption:
    """Handles the stop signals inside its `with` block; in a thread other than the main one it handles none.

    The first signal is noted. A second one raises KeyboardInterrupt with its number, unless it is SIGHUP or comes
    within a second of the first.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._at = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self._handlers = {s: signal.signal(s, self._note) for s in stop_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    @property
    def signal(self) -> signal.Signals | None:
        """The first signal received; None if there was none."""
        return self._signal

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 without one."""
        return 0 if self._signal is None else 128 + self._signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing is printed here: the signal may have come in the middle of printing.
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._at = signal.Signals(number), now
        # A terminal and a parent process may both deliver the same Ctrl-C.
        elif number != signal.SIGHUP and now - self._at > _SAME_INTERRUPT_S:
            raise KeyboardInterrupt(number)
