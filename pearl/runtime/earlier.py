"""Nothing of an earlier run is lost: what stands in the way of a new one gets another name."""

from __future__ import annotations

from pathlib import Path


def free_name(path: Path) -> Path:
    """`path` with `-earlier-001` (or the next number that is free) before its suffix."""
    number = 1
    while (free := path.with_name(f"{path.stem}-earlier-{number:03d}{path.suffix}")).exists():
        number += 1
    return free


def put_aside(path: Path) -> Path:
    """Rename `path` to its free name, which is returned."""
    return path.rename(free_name(path))
