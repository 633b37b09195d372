"""The first call of a program, which imports next to nothing before Ctrl-C ends it with one line."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process with one line: a handler of SIGINT."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def begin_program(actors: int = 0) -> None:
    """Have Ctrl-C end the process with one line, then do as `pearl.runtime.entry.begin_program`, whose imports wait."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from pearl.runtime import entry

    entry.begin_program(actors)
