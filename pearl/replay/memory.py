"""Whether a replay fits the memory that is free, asked before it is made."""

from __future__ import annotations

import os
from pathlib import Path

from pearl.byte_size import readable_size
from pearl.control_groups import group_memory
from pearl.errors import CapacityError

_MEMINFO = Path("/proc/meminfo")


def free_memory() -> int:
    """Bytes that this process can still use, of the machine's and of its control group's."""
    free = _machine_free()
    group = _group_free()
    return free if group is None else min(free, group)


def check_fits(rows: int, row_nbytes: int, free: int) -> None:
    """Raise CapacityError if `rows` transitions of `row_nbytes` need more than `free` bytes."""
    needed = rows * row_nbytes
    if needed > free:
        raise CapacityError(
            f"Replay of {rows:,} transitions of {readable_size(row_nbytes)} each needs {readable_size(needed)}; "
            f"{readable_size(free)} of memory are free. Lower `size`, or make observations smaller "
            "(uint8 images rather than floats)."
        )


def _machine_free() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_free() -> int | None:
    """What the limits of a container leave."""
    group = group_memory()
    return None if group is None else group.free
