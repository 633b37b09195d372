"""Cores and memory that the control groups of this process, for example a container's, allow it.

Any folder from the root of a controller down to this process's group may have a limit: often only the pod or slice
above a container has one. Both versions of control groups are read, also on a system that uses both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")


@dataclass(frozen=True)
class GroupMemory:
    """Bytes: the smallest limit and the smallest free memory of all groups."""

    limit: int
    free: int


def cpu_quota(proc: Path = PROC, sys: Path = SYS) -> float | None:
    """Cores that this process may use (v2 `cpu.max`, v1 `cpu.cfs_quota_us`); None without a limit."""
    limits: list[float] = []
    for folder in _groups("cpu", proc, sys):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def group_memory(proc: Path = PROC, sys: Path = SYS) -> GroupMemory | None:
    """Memory that this process may use (v2 `memory.max` and `memory.high`, v1 `memory.limit_in_bytes`).

    None without a limit. Cached files count as free, since the system can drop them; files in shared memory do not.
    """
    limits, free = [], []
    for folder in _groups("memory", proc, sys):
        found = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limit = min((number for number in found if number is not None), default=None)
        if limit is None:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        limits.append(limit)
        free.append(min(max(limit - used + _cached(folder), 0), limit))
    return GroupMemory(min(limits), min(free)) if limits else None


def _groups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """The folders of this process's groups for `controller`, each after its ancestors; not all need to exist."""
    root = sys / "fs" / "cgroup"
    for line in _read(proc / "self" / "cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            base = root / "unified" if (root / "unified").exists() else root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).exists() else root / controller
        else:
            continue
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield base.joinpath(*parts[:depth])


def _cached(folder: Path) -> int:
    """Bytes of cached files, including those of the group's children."""
    counters: dict[str, int] = {}
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            counters[name] = int(value)
    cached = counters.get("file", counters.get("total_cache", counters.get("cache", 0)))
    in_memory = counters.get("shmem" if "file" in counters else "total_shmem", counters.get("shmem", 0))
    return max(cached - in_memory, 0)


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
