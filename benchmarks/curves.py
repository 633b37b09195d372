"""Does the native learner learn as torch's does? Learning curves of both over the same seeds, on the same programs.

One composed program an implementation and task, all of whose settings are the same; greedy evaluations on the way.
`--quick` is one seed of CartPole-v1, and writes nothing; without it, benchmarks/results/curves.json and the plots in
docs/assets are written.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.peers.training import ROOT, environment
from benchmarks.record import Row, write
from pearl import Composer
from pearl.algorithms import DQN, SAC, TD3
from pearl.exploration import EpsilonGreedy

IMPLEMENTATIONS = ("native", "torch")
ASSETS = ROOT / "docs" / "assets"
EPISODES = 10  # of an evaluation


@dataclass(frozen=True)
class Task:
    """A trainer on an environment, for so many environment steps."""

    trainer: type
    environment: str
    steps: int
    interval: int  # environment steps between evaluations
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.trainer.__name__} {self.environment}"


TASKS = (
    Task(
        DQN,
        "CartPole-v1",
        20_000,
        1_000,
        {
            "hidden_sizes": (64, 64),
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "replay_ratio": 64.0,
            "target_update_interval": 100,
            "exploration": EpsilonGreedy(start=1.0, end=0.04, steps=3_000),
        },
    ),
    Task(TD3, "Pendulum-v1", 8_000, 500, {"learning_rate": 1e-3, "actor_learning_rate": 1e-3, "gamma": 0.98}),
    Task(SAC, "Pendulum-v1", 8_000, 500, {"learning_rate": 1e-3, "actor_learning_rate": 1e-3}),
)

Curves = dict[str, np.ndarray]  # by implementation: mean returns (seeds, evaluations)


def compose(task: Task, implementation: str, folder: Path) -> Path:
    """The program, with the Learner's implementation forced."""
    composer = Composer(progress=False, calibration=folder / "calibration.json")
    composer.set_actors(1, env=task.environment, envs_per_actor=4)
    composer.set_train_function(learner=task.trainer, implementation=implementation, **task.settings)
    composer.set_replay(100_000)
    replay, learner = composer.run()
    path = folder / f"{task.trainer.__name__}_{implementation}.py"
    return composer.runtime_gen(replay=replay, learner=learner, path=path, timesteps=task.steps)


def run(program: Path, task: Task, seed: int) -> np.ndarray:
    """Mean returns of the greedy evaluations `(evaluations,)` of one run."""
    folder = program.with_suffix("") / str(seed)
    options = {
        "--seed": seed,
        "--eval-interval": task.interval,
        "--eval-episodes": EPISODES,
        "--until-return": "none",
        "--run-dir": folder,
    }
    command = [sys.executable, str(program), *(str(part) for option in options.items() for part in option)]
    subprocess.run(command, cwd=program.parent, env=environment(), check=True, capture_output=True)
    found = np.full(task.steps // task.interval, np.nan)
    with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["kind"] != "progress":
                continue
            # Evaluations come when a message has crossed the interval's end.
            place = int(row["env_steps"]) // task.interval - 1
            if place < len(found) and np.isnan(found[place]):
                found[place] = float(row["mean_return"])
    return found


def measure(task: Task, seeds: int, folder: Path) -> Curves:
    """Both implementations, by turns."""
    programs = {name: compose(task, name, folder) for name in IMPLEMENTATIONS}
    found: dict[str, list[np.ndarray]] = {name: [] for name in IMPLEMENTATIONS}
    for seed in range(1, seeds + 1):
        for name, program in programs.items():
            found[name].append(run(program, task, seed))
            print(
                f"{task.name:24} {name:8} seed {seed}  mean of the curve {np.nanmean(found[name][-1]):8.1f}", flush=True
            )
    return {name: np.stack(curves) for name, curves in found.items()}


def rows_of(task: Task, curves: Curves) -> Iterator[Row]:
    """The mean over each seed's curve, and over its last third: medians of the seeds, and their spread."""
    last = -(-next(iter(curves.values())).shape[1] // 3)
    for what, part in (("whole curve", slice(None)), ("last third", slice(-last, None))):
        means = {name: np.nanmean(values[:, part], axis=1) for name, values in curves.items()}
        ours, theirs = means["native"], means["torch"]
        shared = ours.min() <= theirs.max() and theirs.min() <= ours.max()
        how = "ranges of the seeds overlap" if shared else "RANGES OF THE SEEDS DO NOT OVERLAP"
        spread = (float(ours.min()), float(ours.max()))
        peer = f"torch learner ({theirs.min():.0f} to {theirs.max():.0f}; {how})"
        yield Row(
            f"{task.name}, mean return over the {what}", float(np.median(ours)), "return", "higher", spread,
            len(ours), peer, statistics.median(theirs.tolist()),
        )  # fmt: skip


def plot(task: Task, curves: Curves) -> dict[str, str]:
    """Medians over the seeds, and bands from the lowest to the highest."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, found in curves.items():
        seen = ~np.isnan(found).all(axis=0)  # before the first gradient step nothing is evaluated
        values = found[:, seen]
        steps = task.interval * np.flatnonzero(seen) + task.interval
        (line,) = axes.plot(steps, np.nanmedian(values, axis=0), label=f"{name} learner")
        axes.fill_between(
            steps, np.nanmin(values, axis=0), np.nanmax(values, axis=0), alpha=0.2, color=line.get_color()
        )
    axes.set(xlabel="environment steps", ylabel=f"mean return of {EPISODES} greedy episodes", title=task.name)
    axes.legend()
    axes.grid(alpha=0.3)
    file = f"curves_{task.trainer.__name__.lower()}.png"
    figure.savefig(ASSETS / file, dpi=110)
    plt.close(figure)
    seeds = next(iter(curves.values())).shape[0]
    return {"file": file, "title": f"{task.name}: median and range of {seeds} seeds, native and torch learner"}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of CartPole-v1; writes nothing")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each task; other than 5 writes nothing")
    options = parser.parse_args()
    rows, plots = [], []
    writes = not options.quick and options.seeds == 5
    with tempfile.TemporaryDirectory() as scratch:
        for task in TASKS[:1] if options.quick else TASKS:
            curves = measure(task, 1 if options.quick else options.seeds, Path(scratch))
            rows += list(rows_of(task, curves))
            if writes:
                plots.append(plot(task, curves))
    for row in rows:
        print(f"{row.case:55} {row.ours:8.1f}   {row.peer}: {row.theirs:8.1f}")
    if writes:
        write("curves", "make bench-curves", os.cpu_count() or 1, rows, plots=plots)


if __name__ == "__main__":
    main()
