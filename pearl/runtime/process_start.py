"""When this process began."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_started() -> float | None:
    """The time of `time.monotonic()` at which the process began, to a hundredth of a second; None if that is unknown.

    A process that another program replaced itself by began with that program.
    """
    try:
        # After the name, which may contain anything; field 22 of proc(5): ticks since the machine began.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.monotonic() - age_s
