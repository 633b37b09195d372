"""Scalars for TensorBoard; a full disk does not end the run."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from pearl.runtime.log_file import LogFile

_FILES = itertools.count()  # makes names unique within a second


class EventFile:
    """An event file of `folder`. With `purge_step`, TensorBoard hides what earlier files hold from that step on."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
        first = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            first += _record(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._file = LogFile(Path(folder) / name, first, makes_folder=True)

    def scalar(self, name: str, value: float, step: int, wall_time: float) -> None:
        """Record a number at a step, and the time when it was known, in seconds since 1970."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._file.append(_record(Event(wall_time=wall_time, step=step, summary=summary)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _record(event: Event) -> bytes:
    stream = io.BytesIO()
    RecordWriter(stream).write(event.SerializeToString())
    return stream.getvalue()
