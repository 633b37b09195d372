"""Runs of composed programs until they reach a return, and the same curves of a peer: benchmarks that take hours.

A run that ended is not repeated. A program that was interrupted goes on where it was; the peer begins again.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import environment
from benchmarks.record import ROOT, commit


@dataclass(frozen=True)
class Curve:
    """One run's evaluations; `solved` is the place of the one that reached the goal twice, None if none did."""

    seed: int
    steps: np.ndarray
    seconds: np.ndarray
    returns: np.ndarray
    solved: int | None
    commit: str

    @property
    def end(self) -> int:
        """The place of the evaluation that reached the goal, or of the last one."""
        return len(self.steps) - 1 if self.solved is None else self.solved

    def summary(self) -> dict[str, Any]:
        """The run in a record."""
        return {
            "seed": str(self.seed),
            "commit": self.commit,
            "steps": self.steps[-1],
            "seconds": self.seconds[-1],
            "best return": self.returns.max(),
            "last return": self.returns[-1],
            "outcome": "not solved" if self.solved is None else "solved",
        }


def run_to(
    program: Path, seed: int, home: Path, goal: float, interval: int, episodes: int, more: Sequence[str] = ()
) -> Curve:
    """Run a program or an example until its return is `goal`, or go on with it; nothing if it has ended already.

    The run is in `home` / "run". Evaluations are `interval` environment steps apart and play `episodes`.
    """
    folder = home / "run"
    home.mkdir(parents=True, exist_ok=True)
    if not (folder / "summary.json").exists():
        command = [sys.executable, str(program), "--seed", str(seed), "--run-dir", str(folder), "--plain"]
        command += ["--eval-interval", str(interval), "--eval-episodes", str(episodes), f"--until-return={goal}"]
        command += ["--resume"] * (folder / "checkpoints").is_dir()
        command += more
        (home / "commit.txt").write_text(commit(), encoding="utf-8")
        with (home / "output.txt").open("a", encoding="utf-8") as output:
            done = subprocess.run(command, cwd=home, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{program.name} ended with code {done.returncode}; see {home / 'output.txt'}.")
    return read_curve(folder, seed, goal, (home / "commit.txt").read_text(encoding="utf-8"))


def read_curve(folder: Path, seed: int, goal: float, made_at: str) -> Curve:
    """The evaluations during a run, at the steps of the weights that played."""
    points: list[tuple[int, float, float]] = []
    solved = None
    with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            mean = float(row["mean_return"])
            if row["kind"] == "progress":
                points.append((int(row["weights_step"]), float(row["wall_s"]), mean))
            elif row["kind"] == "solved check" and mean >= goal and solved is None:
                solved = len(points) - 1
    steps, seconds, returns = (np.array(values, float) for values in zip(*points, strict=True))
    return Curve(seed, steps, seconds, returns, solved, made_at)


def their_points(file: Path, *arguments: str) -> list[dict[str, float]]:
    """Evaluations of Stable-Baselines3, kept in `file`: environment steps, seconds without evaluations, mean return.

    `arguments` are those of `benchmarks.peers.sb3_curve`. Empty if it failed, which is printed.
    """
    if not file.exists():
        command = [sys.executable, "-m", "benchmarks.peers.sb3_curve", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"Stable-Baselines3 ended with code {done.returncode}: {done.stderr[-500:]}")
            return []
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in done.stdout.splitlines() if line.startswith("{")))
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
