"""Runs until an environment is solved, of a composed program or a peer's script, and their rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.solving import EPISODES, INTERVAL, SOLVED
from benchmarks.programs import environment, run_program
from benchmarks.record import Row


@dataclass(frozen=True)
class Outcome:
    """How one run ended: environment steps, seconds of its process, and whether it solved the environment."""

    steps: int
    seconds: float
    solved: bool


def run_ours(program: Path, goal: float, seed: int) -> Outcome:
    """Run a composed program until a mean return of `goal`, with the rule of `benchmarks.peers.solving`."""
    folder = program.parent / f"seed{seed}"
    arguments = ("--seed", seed, "--eval-interval", INTERVAL, "--eval-episodes", EPISODES, "--no-plot")
    start = time.monotonic()
    run_program(program, *arguments, f"--until-return={goal}", "--run-dir", folder)
    seconds = time.monotonic() - start
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Outcome(int(found["env_steps"]), seconds, str(found["stopped"]).startswith("solved"))


def run_theirs(name: str, module: str, *arguments: object) -> Outcome:
    """Run a script of `benchmarks.peers` that prints its steps; `name` is for the error if it fails."""
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    seconds = time.monotonic() - start
    steps = re.search(r"^Steps: (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or steps is None:
        raise RuntimeError(f"{name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return Outcome(int(steps[1]), seconds, SOLVED in done.stdout)


def rows_of(title: str, runs: Mapping[str, Sequence[Outcome]]) -> Iterator[Row]:
    """Steps and seconds of ours, the first of the `runs`, and of each other."""
    ours, *peers = runs
    for name, unit in (("steps", "steps"), ("seconds", "s")):
        values = {who: [float(getattr(one, name)) for one in found] for who, found in runs.items()}
        for peer in peers:
            case = f"{title}: {name} until solved{_count(runs[ours])}"
            yield Row.of(case, unit, "lower", values[ours], f"{peer}{_count(runs[peer])}", values[peer])


def _count(runs: Sequence[Outcome]) -> str:
    solved = sum(one.solved for one in runs)
    return "" if solved == len(runs) else f" ({solved} of {len(runs)} runs solved it)"
