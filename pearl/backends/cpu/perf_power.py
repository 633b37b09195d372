"""The CPU's energy by the kernel's perf events `power/energy-pkg/` and `power/energy-ram/`: RAPL without its files.

There is one counter for each package, which one of its CPUs reads.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from pearl.control_groups import SYS
from pearl.devices.power import PowerMeter
from pearl.errors import DeviceError

_EVENTS = ("energy-pkg", "energy-ram")
_GRANT = "sudo sysctl kernel.perf_event_paranoid=0"
_PERF_EVENT_OPEN = {"x86_64": 298}  # the number of the system call; only x86 has these events
_ALL_PROCESSES, _NO_GROUP = -1, -1


class _Attributes(ctypes.Structure):
    """The first version of the kernel's `perf_event_attr`."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 6),
    )


OpenEvent = Callable[[int, int, int], int]


def open_event(kind: int, config: int, cpu: int) -> int:
    """The file descriptor of an event of all processes, counted on `cpu`; OSError if the kernel refuses."""
    number = _PERF_EVENT_OPEN.get(os.uname().machine)
    if number is None:
        raise OSError(f"perf's energy events are not known on {os.uname().machine}")
    attributes = _Attributes(kind, ctypes.sizeof(_Attributes), config)
    kernel = ctypes.CDLL(None, use_errno=True)
    descriptor = int(kernel.syscall(number, ctypes.byref(attributes), _ALL_PROCESSES, cpu, _NO_GROUP, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.set_inheritable(descriptor, False)
    return descriptor


class PerfMeter:
    """Joules of all packages and of the memory, since the meter was made."""

    source, counter, most_seconds = "RAPL by perf", "RAPL", math.inf

    def __init__(self, counters: list[tuple[int, float]]) -> None:
        """`counters` are file descriptors, each with its joules per count; the meter closes them."""
        self._counters = counters
        self._first = self._read()

    def joules(self) -> float:
        """Joules since the meter was made."""
        return self._read() - self._first

    def _read(self) -> float:
        try:
            return sum(int.from_bytes(os.read(fd, 8), "little") * scale for fd, scale in self._counters)
        except OSError as error:
            raise DeviceError(f"The CPU's energy events of perf cannot be read: {error.strerror or error}.") from error

    def __del__(self) -> None:
        for descriptor, _ in self._counters:
            os.close(descriptor)


def perf_meter(sys: Path = SYS, open_event: OpenEvent = open_event) -> PowerMeter | None:
    """A meter of this machine's CPU; None if the kernel has no energy events.

    Raises DeviceError if this user may not count them; it says how to get the right.
    """
    folder = sys / "bus/event_source/devices/power"
    events = [event for event in _EVENTS if (folder / "events" / event).exists()]
    if not events:
        return None
    counters: list[tuple[int, float]] = []
    try:
        kind, cpus = int((folder / "type").read_text()), _cpus((folder / "cpumask").read_text())
        for event in events:
            config = _config((folder / "events" / event).read_text())
            scale = float((folder / "events" / f"{event}.scale").read_text())
            counters += [(open_event(kind, config, cpu), scale) for cpu in cpus]
    except (OSError, ValueError) as error:
        for descriptor, _ in counters:
            os.close(descriptor)
        if isinstance(error, PermissionError):
            raise DeviceError(
                "This user may not count perf's energy events of the CPU. To measure power, allow it until the next "
                f"reboot: {_GRANT}"
            ) from error
        raise DeviceError(f"The CPU's energy events of perf in {folder} cannot be used: {error}.") from error
    return PerfMeter(counters)


def _cpus(text: str) -> list[int]:
    """The CPUs of a list such as `0,28`."""
    return [int(cpu) for cpu in text.strip().split(",")]


def _config(text: str) -> int:
    """The number of an event such as `event=0x02`."""
    found = re.fullmatch(r"event=(0x[0-9a-fA-F]+)\s*", text)
    if found is None:
        raise ValueError(f"expected an event such as event=0x02; found {text[:40]!r}")
    return int(found[1], 16)
