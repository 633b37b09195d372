"""Seconds from the start of a process to its first training step, seconds of composing, and peak memory.

Ours are committed examples. Each is composed in an empty folder without earlier measurements (cold), which ends when
its program is written, and once more with them (warm). Then the program runs; it tells itself when its first training
step was done, from the start of its process. Stable-Baselines3 runs with the settings tuned in its RL Zoo, but collects
as many steps before it trains as ours; its first step ends with the first step of an optimizer. These steps are part of
the time on both sides. All sides run with their bytecode compiled, by a first run of each that is not counted.

Memory is the peak of the resident memory of all processes together; each process counts the pages that it shares. That
of a program and of Stable-Baselines3 is over a run of 3,000 steps, with all that a run leaves at its end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.solving import FIRST_STEP
from benchmarks.record import ROOT, Row, shown, write
from benchmarks.solve_time import Outcome, run
from benchmarks.timing import ONE_THREAD, options

STEPS = 3_000
WRITTEN = "Run it:"  # start of the line with which composing ends
LIMIT_S = 120.0
# Where a user set neither: the machine that is measured may.
SETTINGS = {**ONE_THREAD, "PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True)
class Start:
    """A committed example, its environment, and the peer's algorithm; `collected` steps come before the first step."""

    example: str
    environment: str
    algorithm: str
    collected: int


STARTS = (
    Start("dqn_cartpole", "CartPole-v1", "dqn", 1_000),
    Start("sac_pendulum", "Pendulum-v1", "sac", 1_000),
    Start("ppo_cartpole", "CartPole-v1", "ppo", 256),
)


@dataclass
class Found:
    """What the repeats of one example found: seconds and MB."""

    cold: list[Outcome] = field(default_factory=list)
    warm: list[Outcome] = field(default_factory=list)
    programs: list[Outcome] = field(default_factory=list)
    first_steps: list[float] = field(default_factory=list)
    peers: list[Outcome] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why the peer did not run."""
        return next((outcome.reason for outcome in self.peers if not outcome.solved), "")


def run_ours(start: Start, folder: Path, found: Found) -> None:
    """Compose twice and run the program; RuntimeError if one of them fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    more = {**SETTINGS, "PEARL_CACHE_DIR": str(folder / "cache")}
    compose = [sys.executable, str(ROOT / "examples" / f"{start.example}.py"), "--help"]
    for outcomes in (found.cold, found.warm):
        outcomes.append(done := run(compose, folder, LIMIT_S, more, WRITTEN))
        if not done.solved:
            raise RuntimeError(f"{start.example} was not composed: {done.reason}")
    (program,) = folder.glob("runs/*/program.py")
    arguments = ["--timesteps", str(STEPS), "--until-return", "none", "--eval-episodes", "0", "--run-dir", "run"]
    arguments += ["--checkpoint-interval", str(STEPS)]
    found.programs.append(run([sys.executable, str(program), *arguments], folder, LIMIT_S, more))
    summary = folder / "run" / "summary.json"
    if not summary.exists():
        raise RuntimeError(f"{program} did not train: {found.programs[-1].reason}")
    found.first_steps.append(float(json.loads(summary.read_text(encoding="utf-8"))["first_step_s"]))


def run_peer(start: Start, python: Path, folder: Path) -> Outcome:
    """Stable-Baselines3 until its first step, and on to the end of the run."""
    command = [str(python), "-m", "benchmarks.peers.sb3_start", "--algorithm", start.algorithm]
    command += ["--environment", start.environment, "--collected", str(start.collected), "--steps", str(STEPS)]
    return run(command, folder, LIMIT_S, SETTINGS, FIRST_STEP)


def measure(start: Start, repeats: int, python: Path) -> Found:
    """Ours and theirs in turns, after a run of each that does not count."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats + 1):
            if repeat == 1:
                found = Found(peers=[outcome for outcome in found.peers if not outcome.solved])
            run_ours(start, Path(scratch) / "ours", found)
            if not found.reason:
                found.peers.append(run_peer(start, python, Path(scratch)))
    return found


def rows_of(start: Start, found: Found, peer: str) -> Iterator[Row]:
    """Seconds and memory of an example, medians of the repeats."""
    of, reason = f"{start.algorithm.upper()} {start.environment}", found.reason
    theirs: Sequence[Outcome] = () if reason else found.peers
    case = f"{of}: process start to first training step, with {start.collected:,} steps collected"
    yield Row.of(case, "s", "lower", found.first_steps, peer, [o.seconds for o in theirs], reason)
    for how, outcomes in (("cold", found.cold), ("warm", found.warm)):
        yield Row.of(f"{of}: composing, {how}", "s", "lower", [o.seconds for o in outcomes])
    for what, outcomes in (("composing", found.cold), ("the composed program", found.programs)):
        case = f"{of}: peak memory of {what}"
        ours = [o.memory_mb for o in outcomes]
        yield Row.of(case, "MB", "lower", ours, peer, [o.memory_mb for o in theirs], reason)


def main() -> None:
    parser = options(__doc__, "one example, once")
    parser.add_argument("--repeats", type=int, default=7, help="of each example; default: 7")
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable), help="interpreter that has the peer")
    arguments = parser.parse_args()
    python = arguments.peer_python.absolute()
    asked = "from importlib.metadata import version; print(version('stable-baselines3'))"
    version = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False).stdout.strip()
    peer = f"Stable-Baselines3 {version}".strip()
    starts, repeats = (STARTS[:1], 1) if arguments.quick else (STARTS, arguments.repeats)
    rows = [row for start in starts for row in shown(rows_of(start, measure(start, repeats, python), peer))]
    if not arguments.quick:
        write("startup", "make bench-startup", threads=os.cpu_count() or 1, rows=rows)


if __name__ == "__main__":
    main()
