"""Reads the trace of a run: Chrome's trace format (JSON), as Perfetto opens it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pearl.errors import ConfigurationError

MOST_BYTES = 128 * 2**20


class Span(NamedTuple):
    """Work of one lane (a thread), in microseconds of the trace's own clock."""

    lane: str
    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Trace:
    """The complete events ("X") by their start, and the counters ("C"): times in microseconds, and values."""

    spans: tuple[Span, ...]
    counters: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)


def read_trace(path: Path) -> Trace:
    """Read the trace; events that are not understood are left out. Raises ConfigurationError for another file."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigurationError(
                f"The trace {path} has {size / 2**20:,.0f} MiB; a report reads {MOST_BYTES / 2**20:,.0f} MiB at most. "
                "Open it in Perfetto, or trace a shorter run."
            )
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigurationError(f"The trace {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"The trace {path} is not JSON ({error}). A program's --trace writes one.") from error
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ConfigurationError(
            f"{path} is not a trace: expected an object with the list 'traceEvents'. A program's --trace writes one."
        )
    return _trace_of([event for event in events if isinstance(event, dict)])


def _trace_of(events: list[dict[str, Any]]) -> Trace:
    threads = {(_id(e, "pid"), _id(e, "tid")): _name_in(e) for e in events if e.get("name") == "thread_name"}
    devices = {_id(e, "pid"): _name_in(e) for e in events if e.get("name") == "process_name"}
    spans: list[Span] = []
    counters: dict[str, tuple[list[float], list[float]]] = {}
    for event in events:
        start = _number(event.get("ts"))
        if start is None:
            continue
        name, place = str(event.get("name", "?")), (_id(event, "pid"), _id(event, "tid"))
        if event.get("ph") == "X" and (duration := _number(event.get("dur"))) is not None and duration >= 0:
            thread, device = threads.get(place) or f"thread {place[1]}", devices.get(place[0])
            spans.append(Span(f"{thread} on {device}" if device else thread, name, start, duration))
        elif event.get("ph") == "C" and isinstance(event.get("args"), dict):
            values = {key: _number(value) for key, value in event["args"].items()}
            for key, value in values.items():
                if value is not None:
                    times, levels = counters.setdefault(name if len(values) == 1 else f"{name} {key}", ([], []))
                    times.append(start)
                    levels.append(value)
    return Trace(tuple(sorted(spans, key=lambda span: span.start_us)), counters)


def _id(event: dict[str, Any], key: str) -> str:
    return str(event.get(key, ""))


def _name_in(event: dict[str, Any]) -> str:
    arguments = event.get("args")
    return str(arguments.get("name", "")) if isinstance(arguments, dict) else ""


def _number(value: object) -> float | None:
    """The finite number of at most 1e300 in a JSON value, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        return None
    return float(value) if math.isfinite(value) else None
