"""How benchmarks write down what they found, and what found it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One case: `ours` against `theirs` (None: the peer could not run, `reason` says why; no peer: empty name).

    `ratio` says how many times better ours is, whatever `better` says of the unit.
    """

    case: str
    ours: float
    unit: str
    better: Literal["lower", "higher"]
    spread: tuple[float, float]
    n: int
    peer: str = ""
    theirs: float | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; None where a value that is not above 0 makes that meaningless."""
        if self.theirs is None or min(self.ours, self.theirs) <= 0:
            return None
        return self.theirs / self.ours if self.better == "lower" else self.ours / self.theirs


def machine() -> dict[str, object]:
    """The facts that a number depends on."""
    from pearl.backends.cpu.device import describe_cpu

    cpu = describe_cpu()
    return {
        "cpu": cpu.model,
        "cores": cpu.logical_cores,
        "memory_gb": round(cpu.memory_total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit measured, with "-dirty" if the tree differs from it in more than results and documents."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    root = Path(__file__).parent.parent
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=root).stdout.strip()


def write(name: str, command: str, threads: int, rows: Sequence[Row], **more: object) -> Path:
    """Write benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "name": name,
        "command": command,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "load": [round(v, 2) for v in os.getloadavg()],
        "threads": threads,
        **more,
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)
    return path
