"""Keeps the files of an earlier run: a new run renames them instead of overwriting them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def free_name(path: Path) -> Path:
    """`path` with `-earlier-001` (or the next number that is free) before its suffix."""
    number = 1
    while (free := path.with_name(f"{path.stem}-earlier-{number:03d}{path.suffix}")).exists():
        number += 1
    return free


def move_aside(paths: Iterable[Path], folder: Path) -> Path | None:
    """Move those of `paths` that exist into a new `earlier-NNN` of `folder`, which is returned; None if none exists."""
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    number = 1
    while (target := folder / f"earlier-{number:03d}").exists():
        number += 1
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return target


def put_aside(path: Path) -> Path:
    """Rename `path` to its free name, which is returned."""
    return path.rename(free_name(path))
