"""The rows of a benchmark's results: made from samples, printed, and written with the machine and the commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ASSETS = ROOT / "docs" / "assets"

Better = Literal["lower", "higher"]
Document = Mapping[str, Any]


def number(value: float | None) -> str:
    """Four significant digits, with a comma between thousands; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Row:
    """One case: `ours` against `theirs`, which is None where the peer could not run; `reason` says why.

    `peer` is empty where there is nothing to compare with.
    """

    case: str
    ours: float
    unit: str
    better: Better
    spread: tuple[float, float]
    n: int
    peer: str = ""
    theirs: float | None = None
    reason: str = ""

    @classmethod
    def of(
        cls,
        case: str,
        unit: str,
        better: Better,
        ours: ArrayLike,
        peer: str = "",
        theirs: ArrayLike | None = None,
        reason: str = "",
    ) -> Row:
        """Medians of the samples of both sides. The spread is p20 to p80 of ours, or its range up to 10 samples."""
        n = int(np.size(ours))
        outer = 20 if n > 10 else 0
        low, middle, high = (float(v) for v in np.percentile(ours, (outer, 50, 100 - outer)))
        their_median = float(np.median(theirs)) if theirs is not None and np.size(theirs) else None
        return cls(case, middle, unit, better, (low, high), n, peer, their_median, reason)

    @property
    def ratio(self) -> float | None:
        """How many times better ours is, whether lower or higher is better; None if a value is not above 0."""
        if self.theirs is None or min(self.ours, self.theirs) <= 0:
            return None
        return self.theirs / self.ours if self.better == "lower" else self.ours / self.theirs

    def show(self) -> None:
        """Print the row."""
        ratio = "" if self.ratio is None else f"  {self.ratio:.2f}x"
        against = self.reason if self.theirs is None else f"{number(self.theirs)}{ratio}"
        low, high = self.spread
        ours = f"{number(self.ours)} {self.unit} ({number(low)} to {number(high)})"
        print(f"{self.case:60} {ours:40} {self.peer:24} {against}", flush=True)


def shown(rows: Iterable[Row]) -> list[Row]:
    """Print each row as soon as it is measured; return all."""
    found = []
    for row in rows:
        row.show()
        found.append(row)
    return found


def machine() -> dict[str, object]:
    """The facts about this machine that results depend on."""
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
    """The measured commit, with "-dirty" if files other than results, documents and tests have changed."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        unmeasured = (":!benchmarks/results", ":!docs", ":!tests")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *unmeasured)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def row_of(recorded: Mapping[str, Any]) -> Row:
    """A row as write() has written it."""
    names = {f.name for f in fields(Row)}
    return Row(**{k: tuple(v) if k == "spread" else v for k, v in recorded.items() if k in names})


def with_others(
    name: str,
    measured: Collection[str],
    tasks: Iterable[str],
    rows: Sequence[Row],
    runs: Sequence[Document] = (),
    field: str = "",
) -> tuple[list[Row], list[Document], dict[str, object]]:
    """The tasks `measured` now, and the record `name` for the other `tasks`: rows, runs, and their origins.

    The case of a row contains the name of its task, and `field` names that of a run. The last value is for `write`: the
    commit and processor of each task, and a note about those that are not of now.
    """
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    here = {"commit": commit(), "machine": machine()["cpu"]}
    origins: dict[str, Document] = dict.fromkeys(measured, here)
    kept: list[Row] = []
    for task in tasks:
        if task in origins or not (of_task := [row_of(row) for row in known["rows"] if task in row["case"]]):
            continue
        kept += of_task
        origins[task] = known.get("origins", {}).get(task) or {
            "commit": known["commit"],
            "machine": known["machine"]["cpu"],
        }
    others = [run for run in known.get("runs", ()) if run[field] in origins and run[field] not in measured]
    return [*kept, *rows], [*others, *runs], {"origins": origins, **note_of(origins, here)}


def note_of(origins: Mapping[str, Document], here: Document) -> dict[str, object]:
    """Which tasks were measured at another commit or on another machine than `here`, as `note`; empty if none were."""
    others: dict[tuple[str, str], list[str]] = {}
    for task, origin in origins.items():
        if origin != here:
            others.setdefault((origin["commit"], origin["machine"]), []).append(task)
    text = " ".join(
        f"The rows of {', '.join(tasks)} are of commit `{commit_of}` on {cpu}."
        for (commit_of, cpu), tasks in others.items()
    )
    return {"note": text} if text else {}


def by_kernels(name: str) -> str:
    """The record of a benchmark of the native learner: processors with AMX and others have one each.

    Empty if its products are reduced to 16 bits, which nobody records.
    """
    from pearl import _native  # not needed to read records

    kernels = _native.selected_learner_kernels()
    return "" if kernels == "amx, high" else name if kernels == "amx" else f"{name}_{kernels}"


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
