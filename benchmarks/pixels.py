"""Pong from pixels: environment steps and seconds until the return is 18, by the example and Stable-Baselines3.

The example is run as a user runs it, with seeds that no setting was chosen on; composing takes about three seconds and
is not counted. Every 25,000 environment steps the policy plays five greedy episodes, and five others if their mean
reaches 18: solved means that both means do. Seconds are those of training, evaluations among them. Stable-Baselines3's
DQN has the settings of its RL Zoo, one thread of torch and the same preprocessing. It trains for 10,000,000 steps there
and is stopped early here: its row has the seconds that it takes for as many steps as the example took, by its speed in
the last 25,000 steps that it made, without evaluations. If it has not solved Pong by then, it needs longer than that.

A run that was interrupted is resumed, and one that ended is not repeated: the runs are in runs/bench-pixels.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pong import ENV as THEIR_ENV
from benchmarks.pong import missing
from benchmarks.programs import environment
from benchmarks.record import ASSETS, ROOT, Row, commit, shown, write
from benchmarks.timing import options

EXAMPLE = ROOT / "examples" / "dqn_pong.py"
FOLDER = ROOT / "runs" / "bench-pixels"
GOAL = 18.0
INTERVAL, EPISODES = 25_000, 5
FIRST_SEED = 11
THEIR_STEPS = 125_000  # 100,000 without training, as the Zoo has it, then 25,000 with it
LEAST = -21.0  # Pong's lowest return


@dataclass(frozen=True)
class Curve:
    """One run's evaluations; `solved` is the place of the one that found Pong solved, None if none did."""

    seed: int
    steps: np.ndarray
    seconds: np.ndarray
    returns: np.ndarray
    solved: int | None
    commit: str


def train(seed: int, within: Path, *more: str) -> Curve:
    """Run the example, or go on with it, in a folder below `within`; nothing if it has ended already."""
    home = within / f"seed-{seed}"
    folder = home / "run"
    home.mkdir(parents=True, exist_ok=True)
    if not (folder / "summary.json").exists():
        command = [sys.executable, str(EXAMPLE), "--seed", str(seed), "--run-dir", str(folder), "--plain"]
        command += ["--eval-interval", str(INTERVAL), "--eval-episodes", str(EPISODES), f"--until-return={GOAL}"]
        command += ["--resume"] * (folder / "checkpoints").is_dir()
        command += more
        (home / "commit.txt").write_text(commit(), encoding="utf-8")
        with (home / "output.txt").open("a", encoding="utf-8") as output:
            done = subprocess.run(command, cwd=home, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"The example ended with code {done.returncode}; see {home / 'output.txt'}.")
    return read_curve(folder, seed, (home / "commit.txt").read_text(encoding="utf-8"))


def read_curve(folder: Path, seed: int, made_at: str) -> Curve:
    """The evaluations during a run, at the steps of the weights that played."""
    points: list[tuple[int, float, float]] = []
    solved = None
    with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            mean = float(row["mean_return"])
            if row["kind"] == "progress":
                points.append((int(row["weights_step"]), float(row["wall_s"]), mean))
            elif row["kind"] == "solved check" and mean >= GOAL and solved is None:
                solved = len(points) - 1
    steps, seconds, returns = (np.array(values, float) for values in zip(*points, strict=True))
    return Curve(seed, steps, seconds, returns, solved, made_at)


def their_points(steps: int) -> list[dict[str, float]]:
    """Evaluations of Stable-Baselines3: environment steps, seconds without evaluations and mean return."""
    file = FOLDER / "stable_baselines3.jsonl"
    if not file.exists():
        command = [sys.executable, "-m", "benchmarks.peers.sb3_curve", THEIR_ENV, "--steps", str(steps)]
        command += ["--interval", str(INTERVAL), "--episodes", "1", "--of-zoo"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"Stable-Baselines3 ended with code {done.returncode}: {done.stderr[-500:]}")
            return []
        file.write_text("".join(f"{line}\n" for line in done.stdout.splitlines() if line.startswith("{")))
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def their_seconds(points: Sequence[dict[str, float]], steps: float) -> float:
    """How long they take for `steps`: measured, or by their speed in the last interval."""
    known_steps, known = ([0.0, *(point[key] for point in points)] for key in ("steps", "seconds"))
    if steps <= known_steps[-1]:
        return float(np.interp(steps, known_steps, known))
    pace = (known[-1] - known[-2]) / (known_steps[-1] - known_steps[-2])
    return known[-1] + pace * (steps - known_steps[-1])


def rows_of(curves: Sequence[Curve], theirs: Sequence[dict[str, float]]) -> Iterator[Row]:
    """Steps and seconds of the runs, until they solved Pong or ended, and the same number of steps by the peer."""
    solved = sum(curve.solved is not None for curve in curves)
    case = f"DQN Pong from pixels, until 18 ({solved} of {len(curves)} seeds solved it)"
    last = [len(curve.steps) - 1 if curve.solved is None else curve.solved for curve in curves]
    steps = [curve.steps[place] for curve, place in zip(curves, last, strict=True)]
    seconds = [curve.seconds[place] for curve, place in zip(curves, last, strict=True)]
    yield Row.of(f"{case}: environment steps", "steps", "lower", steps)
    best = max((point["return"] for point in theirs), default=LEAST)
    peer = f"Stable-Baselines3 DQN, RL Zoo settings, for as many steps (best return when it was stopped: {best:.0f})"
    reason = "" if len(theirs) > 1 else "it did not run long enough"
    found = None if reason else [their_seconds(theirs, n) for n in steps]
    yield Row.of(f"{case}: seconds", "s", "lower", seconds, peer, found, reason)


def plot(curves: Sequence[Curve]) -> dict[str, str]:
    """Greedy returns of each seed over environment steps and over minutes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained", sharey=True)
    for curve in curves:
        for axes, x in zip(panels, (curve.steps / 1000, curve.seconds / 60), strict=True):
            axes.plot(x, curve.returns, marker=".", label=f"seed {curve.seed}")
    for axes, label in zip(panels, ("thousand environment steps", "minutes"), strict=True):
        axes.axhline(GOAL, color="gray", linestyle="--", linewidth=1)
        axes.set(xlabel=label, ylim=(LEAST - 1, 22))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"mean return of {EPISODES} greedy episodes")
    panels[0].legend()
    figure.savefig(ASSETS / "pong_learning_curve.png", dpi=110)
    plt.close(figure)
    return {"file": "pong_learning_curve.png", "title": f"Pong from pixels: {len(curves)} seeds"}


def main() -> None:
    parser = options(__doc__, "12,000 steps of one seed, without the peer")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default: 3)")
    parser.add_argument("--their-steps", type=int, default=THEIR_STEPS, help="steps of Stable-Baselines3")
    arguments = parser.parse_args()
    if reason := missing():
        print(f"Pong cannot be made here: {reason}. Install the extra: pip install 'pearl-toolkit[atari]'.")
        return
    if arguments.quick:
        with tempfile.TemporaryDirectory() as scratch:
            shown(rows_of([train(FIRST_SEED, Path(scratch), "--timesteps", "12000")], ()))
        return
    curves = [train(seed, FOLDER) for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds)]
    theirs = their_points(arguments.their_steps)
    rows = shown(rows_of(curves, theirs))
    runs: list[dict[str, Any]] = [
        {
            "seed": str(curve.seed),
            "commit": curve.commit,
            "steps": curve.steps[-1],
            "seconds": curve.seconds[-1],
            "best return": curve.returns.max(),
            "last return": curve.returns[-1],
            "outcome": "not solved" if curve.solved is None else "solved",
        }
        for curve in curves
    ]
    write("pixels", "make bench-pixels", os.cpu_count() or 1, rows, plots=[plot(curves)], runs=runs)


if __name__ == "__main__":
    main()
