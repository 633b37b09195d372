"""The file of `--trace`: what each thread did when, and the fill levels of the queues, for Perfetto or Chrome.

The format is Chrome's Trace Event Format: one process for each device, one thread for each of the run's, a complete
event ("X") for each piece of work, a counter ("C") for each queue.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pearl.atomic_file import write_text
from pearl.errors import ConfigurationError
from pearl.recorder import Event

logger = logging.getLogger("pearl.runtime")

EVENTS_PER_THREAD = 50_000
COUNTER_ROWS = 4_000

# The threads' short names for their parts, as the composer's reports call them.
_NAMES = {
    "sample": "sampling",
    "train": "training",
    "insert": "insertion",
    "publish": "publishing weights",
    "collect": "collection",
}


@dataclass(frozen=True)
class Track:
    """The events of one thread on a device; tracks of the same name and device are one."""

    thread: str
    device: str
    events: Sequence[Event]


class Filled(Protocol):
    """A queue's fill level."""

    @property
    def filled(self) -> int:
        """Messages or transitions in it."""


class Trace:
    """Writes one trace to `path`, which it replaces; its folder is made.

    The newest `events_per_thread` events of each thread and `counter_rows` records of the queues are kept, so memory
    and file stay small however long the run is; 50,000 events take about 5 MB. Raises ConfigurationError where the
    file could not be written.
    """

    def __init__(
        self, path: Path, events_per_thread: int = EVENTS_PER_THREAD, counter_rows: int = COUNTER_ROWS
    ) -> None:
        self.path, self.events_per_thread, self.counter_rows = path, events_per_thread, counter_rows
        folder, reason = path.absolute().parent, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"its folder cannot be made ({error.strerror})"
        if path.is_dir():
            reason = "it is a folder"
        elif not reason and not os.access(folder, os.W_OK | os.X_OK):
            reason = f"the folder {folder} is not writable"
        if reason:
            raise ConfigurationError(f"The trace {path} cannot be written: {reason}. Give --trace another path.")

    def write(
        self,
        tracks: Iterable[Track],
        levels: Iterable[tuple[float, Mapping[str, Filled]]],
        say: Callable[[str], None],
    ) -> None:
        """Write the file whole or not at all; `say` tells the user where it is. A failure is a warning."""
        document = {"displayTimeUnit": "ms", "traceEvents": list(_events(list(tracks), list(levels)))}
        try:
            write_text(self.path, json.dumps(document, separators=(",", ":")) + "\n", durable=False)
        except OSError as error:
            logger.warning("The trace %s cannot be written: %s.", self.path, error.strerror or error)
            return
        say(f"Trace:          {self.path}, which https://ui.perfetto.dev opens")


def _events(tracks: Sequence[Track], levels: Sequence[tuple[float, Mapping[str, Filled]]]) -> Iterator[dict[str, Any]]:
    starts = [event[1] for track in tracks for event in track.events]
    origin = min([*starts, *(moment for moment, _ in levels)], default=0.0)
    devices = list(dict.fromkeys(track.device for track in tracks))
    threads = list(dict.fromkeys((track.device, track.thread) for track in tracks))
    for process, device in enumerate(devices, 1):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": device}}
    for thread, (device, name) in enumerate(threads, 1):
        place = {"pid": devices.index(device) + 1, "tid": thread}
        yield {"ph": "M", **place, "name": "thread_name", "args": {"name": name}}
        # A part inside another, such as a gather inside the host's messages, follows it.
        events = [e for track in tracks if (track.device, track.thread) == (device, name) for e in track.events]
        for part, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
            times = {"ts": _us(start - origin), "dur": _us(end - start)}
            yield {"ph": "X", **place, "name": _NAMES.get(part, part), "cat": "primitive", **times}
    yield {"ph": "M", "pid": len(devices) + 1, "name": "process_name", "args": {"name": "queues"}}
    shown: dict[str, int] = {}
    for moment, found in levels:
        for name, level in found.items():
            if shown.get(name) != level.filled:
                shown[name] = level.filled
                at = {"pid": len(devices) + 1, "ts": _us(moment - origin)}
                yield {"ph": "C", **at, "name": name, "args": {"filled": level.filled}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
