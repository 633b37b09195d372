"""Readable sizes in bytes."""

from __future__ import annotations

_UNITS = ("KB", "MB", "GB", "TB")


def readable_size(nbytes: float) -> str:
    """`nbytes` in the decimal unit that leaves one to three digits before the point: 999 B, 1.0 KB, 56.4 GB."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    value, unit = nbytes / 1e3, 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:,.1f} {_UNITS[unit]}"
