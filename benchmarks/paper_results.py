"""What the sections of docs/paper.md share: committed results, and how their values are shown."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from benchmarks.record import RESULTS

WIDTH = 120
PAIR = re.compile(r"(.+) batch (\d+): RM on (\S+), Learner on (\S+) \((\w+)\)")  # a row of `paper_runs`


@dataclass(frozen=True)
class Results:
    """A committed file of results: the medians by case, and the document with machine, commit and other facts."""

    document: dict[str, Any]
    medians: dict[str, float]

    @classmethod
    def load(cls, name: str) -> Results:
        """benchmarks/results/<name>.json; of several rows of a case, which differ in the peer, the first."""
        document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        medians: dict[str, float] = {}
        for row in document["rows"]:
            medians.setdefault(row["case"], row["ours"])
        return cls(document, medians)

    def get(self, case: str) -> float | None:
        """The median of a case; None if it was not measured."""
        return self.medians.get(case)

    @property
    def provenance(self) -> str:
        """The command, commit, date and machine in words."""
        found = self.document
        part = ", a small part only (`--quick`)" if found.get("quick") else ""
        return f"`{found['command']}`{part}, commit `{found['commit']}`, {found['date']}, {found['machine']['cpu']}"

    def placements(self) -> dict[tuple[str, int], dict[tuple[str, str], tuple[float, str]]]:
        """EPS and Learner of each pair of devices, by workload and batch size."""
        found: dict[tuple[str, int], dict[tuple[str, str], tuple[float, str]]] = {}
        for case, eps in self.medians.items():
            if match := PAIR.fullmatch(case):
                workload, batch, replay, learner, implementation = match.groups()
                found.setdefault((workload, int(batch)), {})[replay, learner] = eps, implementation
        return found


def paragraph(text: str) -> str:
    """Text in lines of the documents' width."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def rate(value: float) -> str:
    """A rate as the paper prints it, with K for thousands; M for millions, which it does not reach."""
    if value >= 1e6:
        return f"{value / 1e6:,.1f}M"
    return f"{value / 1000:,.1f}K" if value >= 1000 else f"{value:,.4g}"


def microseconds(value: float | None) -> str:
    """A latency with three significant digits; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
