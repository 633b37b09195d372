"""Threads and processes that Python waits for at its end, such as those of environments and callbacks."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable

_PATIENCE_S = 1.0


def watch_lingering(tell: Callable[[list[str]], None]) -> None:
    """Call this last: if Python still waits for threads or processes after a second, `tell` gets their names.

    Idle threads of a pool end before, as Python's end tells them to.
    """
    if _lingering():
        threading.Thread(target=_watch, args=(tell,), daemon=True).start()


def _watch(tell: Callable[[list[str]], None]) -> None:
    time.sleep(_PATIENCE_S)
    if names := _lingering():
        tell(names)


def _lingering() -> list[str]:
    main = threading.main_thread()
    threads = [one.name for one in threading.enumerate() if not one.daemon and one is not main]
    children = multiprocessing.active_children()
    return threads + [f"{one.name} (process {one.pid})" for one in children if not one.daemon]
