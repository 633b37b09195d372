"""Pong from pixels: environment steps and seconds until the return is 18, by the example and Stable-Baselines3.

The example is run as a user runs it, with seeds that no setting was chosen on; composing takes about three seconds and
is not counted. Every 25,000 environment steps the policy plays five greedy episodes, and five others if their mean
reaches 18: solved means that both means do. Seconds are those of training, with evaluations. Stable-Baselines3's DQN
has the settings of its RL Zoo, one thread of torch and the same preprocessing. It trains for 10,000,000 steps there and
is stopped early here. Its row has the seconds that it needs for the example's number of steps, without evaluations,
extrapolated from the speed of its last 25,000 steps. If it has not solved Pong by then, it needs longer than that.

A run that was interrupted is resumed, and one that ended is not repeated: the runs are in runs/bench-pixels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.pong import ENV as THEIR_ENV
from benchmarks.pong import missing
from benchmarks.reaching import Curve, run_to, their_points
from benchmarks.record import ASSETS, ROOT, Row, shown, write
from benchmarks.timing import options

EXAMPLE = ROOT / "examples" / "dqn_pong.py"
FOLDER = ROOT / "runs" / "bench-pixels"
GOAL = 18.0
INTERVAL, EPISODES = 25_000, 5
FIRST_SEED = 11
THEIR_STEPS = 125_000  # 100,000 without training, as the Zoo has it, then 25,000 with it
LEAST = -21.0  # Pong's lowest return


def train(seed: int, within: Path, *more: str) -> Curve:
    """Run the example, or go on with it, in a folder below `within`; nothing if it has ended already."""
    return run_to(EXAMPLE, seed, within / f"seed-{seed}", GOAL, INTERVAL, EPISODES, more)


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
    steps = [curve.steps[curve.end] for curve in curves]
    seconds = [curve.seconds[curve.end] for curve in curves]
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
    length = ("--steps", str(arguments.their_steps), "--interval", str(INTERVAL), "--episodes", "1", "--of-zoo")
    theirs = their_points(FOLDER / "stable_baselines3.jsonl", THEIR_ENV, *length)
    rows = shown(rows_of(curves, theirs))
    runs = [curve.summary() for curve in curves]
    write("pixels", "make bench-pixels", os.cpu_count() or 1, rows, plots=[plot(curves)], runs=runs)


if __name__ == "__main__":
    main()
