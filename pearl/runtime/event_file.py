"""Scalars for TensorBoard; a full disk does not end the run."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import struct
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

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
    """The event as TFRecord; TensorBoard's own writer imports fsspec and asyncio, longer than short runs train."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc_table() -> tuple[int, ...]:
    """The CRC-32C (Castagnoli) of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return tuple(table)
