"""MuJoCo by SAC: seconds until the return that Stable-Baselines3's SAC has after 100,000 environment steps.

Stable-Baselines3 trains for 100,000 steps with the settings of its RL Zoo and one thread of torch; the goal is the
median, over its seeds, of the mean return of 20 greedy episodes at the end. Its seconds are without evaluations. Ours
is the composition of examples/zoo, composed without earlier measurements: every 10,000 environment steps the policy
plays 20 greedy episodes, and 20 others if their mean reaches the goal; the run ends when both means do, or after
200,000 steps. Its seconds are those of composing, of training and of the evaluations. Its learning rates and its
gradient steps per environment step were chosen with seed 101, which is not among these.

Runs that ended are not repeated; they are in runs/bench-returns. A run of ours that was interrupted is resumed, one of
Stable-Baselines3 begins again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.programs import environment
from benchmarks.reaching import Curve, run_to, their_points
from benchmarks.record import ROOT, Row, shown, write
from benchmarks.timing import options

ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5")
FOLDER = ROOT / "runs" / "bench-returns"
STEPS, MOST = 100_000, 200_000
INTERVAL, EPISODES = 10_000, 20


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
    environment_id: str, curves: Sequence[Curve], composing_s: float, theirs: Sequence[Sequence[dict[str, float]]]
) -> Iterator[Row]:
    """Steps and seconds of our runs until they reached the goal or ended, and of the peer's whole runs."""
    reached = sum(curve.solved is not None for curve in curves)
    last = [points[-1] for points in theirs]
    case = f"SAC {environment_id} until {goal_of(theirs):,.0f} ({reached} of {len(curves)} seeds reached it)"
    low, high = (choose(point["return"] for point in last) for choose in (min, max))
    peer = f"Stable-Baselines3 SAC, RL Zoo settings, whose seeds reached {low:,.0f} to {high:,.0f}"
    for what, unit, key, extra in (
        ("environment steps", "steps", "steps", 0.0),
        ("seconds", "s", "seconds", composing_s),
    ):
        ours = [getattr(curve, key)[curve.end] + extra for curve in curves]
        yield Row.of(f"{case}: {what}", unit, "lower", ours, peer, [point[key] for point in last])


def goal_of(theirs: Sequence[Sequence[dict[str, float]]]) -> float:
    """The median of the returns that the peer's runs end with."""
    return float(np.median([points[-1]["return"] for points in theirs]))


def main() -> None:
    parser = options(__doc__, "6,000 steps of ours on the first environment, without the peer")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each side (default: 3)")
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as scratch:
            program, composing_s = composed(ENVIRONMENTS[0], Path(scratch))
            short = ("--timesteps", "6000")
            curve = run_to(program, 1, Path(scratch), float("inf"), 3_000, EPISODES, short)
            print(f"{ENVIRONMENTS[0]}: composed in {composing_s:.1f} s; {curve.summary()}")
        return
    rows, runs = [], []
    seeds = range(1, arguments.seeds + 1)
    for env in ENVIRONMENTS:
        length = ("--steps", str(STEPS), "--interval", str(INTERVAL), "--episodes", str(EPISODES), "--of-zoo")
        theirs = [their_points(FOLDER / f"sb3-{env}-{seed}.jsonl", env, *length, "--seed", str(seed)) for seed in seeds]
        if not all(theirs):
            print("Nothing is written.")
            return
        goal = goal_of(theirs)
        program, composing_s = composed(env, FOLDER / env)
        more = ("--timesteps", str(MOST))
        curves = [run_to(program, seed, FOLDER / env / str(seed), goal, INTERVAL, EPISODES, more) for seed in seeds]
        rows += shown(rows_of(env, curves, composing_s, theirs))
        runs += [{"environment": env, **curve.summary()} for curve in curves]
    write("returns", "make bench-returns", os.cpu_count() or 1, rows, runs=runs)


if __name__ == "__main__":
    main()
