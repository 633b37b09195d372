"""Checks, before a replay is made, that it fits the free memory."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from pearl.byte_size import readable_size
from pearl.control_groups import group_memory
from pearl.errors import CapacityError

_CAPACITY_MAX = 2**36
_SMALL = 2**20  # bytes that are assumed to be free: reading the free memory takes longer than making so small a replay
_MEMINFO = Path("/proc/meminfo")


def free_memory() -> int:
    """Bytes that the machine and the control group still allow this process."""
    free, group = _machine_free(), group_memory()
    return free if group is None else min(free, group.free)


def check_fits(rows: int, row_nbytes: int, free: int | None = None) -> None:
    """Raise CapacityError if `rows` transitions of `row_nbytes` need more than `free` bytes; None: the host's."""
    needed = rows * row_nbytes
    free = _free_for(needed) if free is None else free
    if needed > free:
        raise CapacityError(
            f"Replay of {rows:,} transitions of {readable_size(row_nbytes)} each needs {readable_size(needed)}; "
            f"{readable_size(free)} of memory are free. Lower `size`, or make observations smaller "
            "(uint8 images rather than floats)."
        )


def check_slots_fit(capacity: int, slot_nbytes: float, free: int | None = None, device: str = "") -> None:
    """Raise CapacityError if a Replay Manager of `capacity` slots needs more than `free` bytes; None: the host's.

    The system commits memory at the first write: without this check, a too large replay would end the process. A
    capacity that no kernel takes passes: the kernel's own message is better.
    """
    if not 1 <= operator.index(capacity) <= _CAPACITY_MAX:
        return
    needed = capacity * slot_nbytes
    free = _free_for(needed) if free is None else free
    if needed > free:
        raise CapacityError(
            f"A Replay Manager of {capacity:,} slots needs {readable_size(needed)}; {readable_size(free)} of memory "
            f"are free{device and f' on {device}'}. Lower `size`."
        )


def _free_for(needed: float) -> int:
    return free_memory() if needed > _SMALL else _SMALL


def _machine_free() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
