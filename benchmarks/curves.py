"""Learning curves of the native learner and of torch's learner.

Five seeds of the same composed program with each learner, with evaluations on 10 greedy episodes during training. Rows
compare each seed's mean over its evaluations, and over the last third of them.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.programs import composer_of, run_program
from benchmarks.record import ASSETS, Row, shown, write
from benchmarks.timing import options
from pearl.algorithms import DQN, SAC, TD3
from pearl.exploration import EpsilonGreedy

IMPLEMENTATIONS = ("native", "torch")
EPISODES = 10  # per evaluation


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
            "n_step": 1,
            "learning_rate_schedule": "constant",
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
    composer = composer_of(
        folder, task.trainer, task.environment, 4, 100_000, {}, implementation=implementation, **task.settings
    )
    composer.run()
    program: Path = composer.runtime_gen(
        path=folder / f"{task.trainer.__name__}_{implementation}.py", timesteps=task.steps
    )
    return program


def run(program: Path, task: Task, seed: int) -> np.ndarray:
    """Mean returns of the greedy evaluations `(evaluations,)` of one run."""
    folder = program.with_suffix("") / str(seed)
    arguments = ("--seed", seed, "--eval-interval", task.interval, "--eval-episodes", EPISODES)
    run_program(program, *arguments, "--until-return", "none", "--run-dir", folder)
    found = np.full(task.steps // task.interval, np.nan)
    with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["kind"] != "progress":
                continue
            # A message may cross the end of the interval before the evaluation.
            place = int(row["env_steps"]) // task.interval - 1
            if place < len(found) and np.isnan(found[place]):
                found[place] = float(row["mean_return"])
    return found


def measure(task: Task, seeds: int, folder: Path) -> Curves:
    """Both implementations, in turn."""
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
    """The mean over each seed's curve, and over its last third."""
    last = -(-next(iter(curves.values())).shape[1] // 3)
    for what, part in (("whole curve", slice(None)), ("last third", slice(-last, None))):
        means = {name: np.nanmean(values[:, part], axis=1) for name, values in curves.items()}
        ours, theirs = means["native"], means["torch"]
        shared = ours.min() <= theirs.max() and theirs.min() <= ours.max()
        how = "ranges of the seeds overlap" if shared else "RANGES OF THE SEEDS DO NOT OVERLAP"
        peer = f"torch learner ({theirs.min():.0f} to {theirs.max():.0f}; {how})"
        yield Row.of(f"{task.name}, mean return over the {what}", "return", "higher", ours, peer, theirs)


def plot(task: Task, curves: Curves) -> dict[str, str]:
    """Medians over the seeds, and bands from the lowest to the highest."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, found in curves.items():
        seen = ~np.isnan(found).all(axis=0)  # no evaluations before the first gradient step
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
    parser = options(__doc__, "one seed of CartPole-v1")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each task; other than 5 writes nothing")
    arguments = parser.parse_args()
    rows, plots = [], []
    writes = not arguments.quick and arguments.seeds == 5
    with tempfile.TemporaryDirectory() as scratch:
        for task in TASKS[:1] if arguments.quick else TASKS:
            curves = measure(task, 1 if arguments.quick else arguments.seeds, Path(scratch))
            rows += shown(rows_of(task, curves))
            if writes:
                plots.append(plot(task, curves))
    if writes:
        write("curves", "make bench-curves", os.cpu_count() or 1, rows, plots=plots)


if __name__ == "__main__":
    main()
