"""SAC on MuJoCo and BipedalWalker: seconds until a return, compared with Stable-Baselines3's SAC.

Stable-Baselines3 trains with the settings of its RL Zoo and one thread of torch. On MuJoCo it does so for 100,000
environment steps, and the goal is the median, over its seeds, of the mean return of 20 greedy episodes at the end. On
BipedalWalker, where RL Zoo trains for 500,000 steps and publishes 298, the goal is 285; it trains for 2,100 s with one
seed, and its row says what it had reached then. Its seconds are without evaluations.

Ours is the composition of examples/zoo, composed without earlier measurements: every 10,000 environment steps the
policy plays 20 greedy episodes, and 20 others if their mean reaches the goal; the run ends when both means do, or after
200,000 steps (BipedalWalker: 500,000). Its seconds are those of composing, of training and of the evaluations. Its
learning rates, its gradient steps per environment step and BipedalWalker's returns of three steps were chosen with seed
101, which is not among these.

Runs that ended are not repeated; they are in runs/bench-returns. A run of ours that was interrupted is resumed, one of
Stable-Baselines3 begins again.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.programs import environment
from benchmarks.reaching import Curve, run_to, their_points
from benchmarks.record import ROOT, Row, shown, with_others, write
from benchmarks.timing import options

FOLDER = ROOT / "runs" / "bench-returns"
INTERVAL, EPISODES = 10_000, 20


@dataclass(frozen=True)
class Case:
    """An environment, how far the peer trains, with how many seeds at most, and how far ours may.

    The goal is what the peer reached, or the one given here.
    """

    environment: str
    their_steps: int = 100_000
    their_seconds: float = math.inf
    their_seeds: int | None = None
    goal: float | None = None
    most: int = 200_000


CASES = (
    Case("HalfCheetah-v5"),
    Case("Hopper-v5"),
    Case("BipedalWalker-v3", 500_000, 2_100.0, 1, 285.0, 500_000),
)


def composed(environment_id: str, folder: Path) -> tuple[Path, float]:
    """The program of a composition, written into `folder` unless it is there, and the seconds that composing took."""
    program, took = folder / "program.py", folder / "composing_seconds.txt"
    if not took.exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec = ROOT / "examples" / "zoo" / f"sac-{environment_id}.toml"
        command = [sys.executable, "-m", "pearl", "compose", str(spec), "--output", str(program)]
        start = time.perf_counter()
        hidden = {**environment(), "PEARL_CACHE_DIR": str(folder / "cache")}
        subprocess.run(command, check=True, env=hidden, stdout=subprocess.DEVNULL)
        took.write_text(f"{time.perf_counter() - start:.3f}\n", encoding="utf-8")
    return program, float(took.read_text(encoding="utf-8"))


def rows_of(
    case: Case, curves: Sequence[Curve], composing_s: float, theirs: Sequence[Sequence[dict[str, float]]]
) -> Iterator[Row]:
    """Steps and seconds of our runs until they reached the goal or ended, and of the peer's whole runs."""
    reached = sum(curve.solved is not None for curve in curves)
    last = [points[-1] for points in theirs]
    goal = f"{goal_of(case, theirs):,.0f} ({reached} of {len(curves)} seeds reached it)"
    low, high = (choose(point["return"] for point in last) for choose in (min, max))
    found = f"{low:,.0f} to {high:,.0f}" if len(last) > 1 else f"{low:,.0f}"
    peer = f"Stable-Baselines3 SAC, RL Zoo settings, stopped there with a return of {found}"
    for what, unit, key, extra in (
        ("environment steps", "steps", "steps", 0.0),
        ("seconds", "s", "seconds", composing_s),
    ):
        ours = [getattr(curve, key)[curve.end] + extra for curve in curves]
        name = f"SAC {case.environment} until {goal}: {what}"
        yield Row.of(name, unit, "lower", ours, peer, [point[key] for point in last])


def goal_of(case: Case, theirs: Sequence[Sequence[dict[str, float]]]) -> float:
    """The goal of a case: by default the median of the returns that the peer's runs end with."""
    return float(np.median([points[-1]["return"] for points in theirs])) if case.goal is None else case.goal


def curves_of(case: Case, seeds: Sequence[int]) -> list[list[dict[str, float]]]:
    """The peer's evaluations; those of a seed are empty if it failed."""
    length = ["--steps", str(case.their_steps), "--interval", str(INTERVAL), "--episodes", str(EPISODES), "--of-zoo"]
    if math.isfinite(case.their_seconds):
        length += ["--seconds", str(case.their_seconds)]
    env = case.environment
    return [
        their_points(FOLDER / f"sb3-{env}-{seed}.jsonl", env, *length, "--seed", str(seed))
        for seed in seeds[: case.their_seeds]
    ]


def main() -> None:
    parser = options(__doc__, "6,000 steps of ours on the first environment, without the peer")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each side (default: 3)")
    parser.add_argument(
        "--only",
        choices=[case.environment for case in CASES],
        action="append",
        help="these environments; the record keeps the others, and says of which commit they are",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as scratch:
            environment_id = CASES[0].environment
            program, composing_s = composed(environment_id, Path(scratch))
            short = ("--timesteps", "6000")
            curve = run_to(program, 1, Path(scratch), float("inf"), 3_000, EPISODES, short)
            print(f"{environment_id}: composed in {composing_s:.1f} s; {curve.summary()}")
        return
    seeds = range(1, arguments.seeds + 1)
    for case in CASES:
        if arguments.only is not None and case.environment not in arguments.only:
            continue
        theirs = curves_of(case, seeds)
        if not all(theirs):
            print(f"{case.environment}: nothing is written.")
            continue
        goal, folder = goal_of(case, theirs), FOLDER / case.environment
        program, composing_s = composed(case.environment, folder)
        more = ("--timesteps", str(case.most))
        curves = [run_to(program, seed, folder / str(seed), goal, INTERVAL, EPISODES, more) for seed in seeds]
        found = shown(rows_of(case, curves, composing_s, theirs))
        new = [{"environment": case.environment, **curve.summary()} for curve in curves]
        rows, runs, origins = with_others(
            "returns", [case.environment], [c.environment for c in CASES], found, new, "environment"
        )
        write("returns", "make bench-returns", os.cpu_count() or 1, rows, runs=runs, **origins)


if __name__ == "__main__":
    main()
