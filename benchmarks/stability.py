"""Returns of runs that go on for five times the steps of their example.

A composed program does not stop where its environment is solved. Greedy episodes evaluate the current weights, 30
times; none are selected. Rows give each seed's mean over the last third of its evaluations, by the settings of the
examples ("after") and, where these changed, by the former ones ("before"). The share kept is the last third compared
with the best third of the same run, counted from the return of a random policy.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import composer_of, run_program
from benchmarks.record import ASSETS, ROOT, Row, shown, with_others, write
from benchmarks.timing import options
from composer.spec_file import load_spec, read_tables
from pearl.algorithms import DQN
from pearl.exploration import EpsilonGreedy

BEFORE, AFTER = "before", "after"
EVALUATIONS, EPISODES = 30, 10
FIRST_SEED = 3001  # settings were chosen on seeds from 1001 to 1008, and others seen from 2001 to 2005
LONGER = 5


@dataclass(frozen=True)
class Former:
    """Settings that an example of `DQN` had before, by `envs` environments."""

    envs: int
    settings: Mapping[str, object]


@dataclass(frozen=True)
class Task:
    """An example, and the return of a random policy. `before` is None where nothing changed."""

    algorithm: str
    example: str  # a composition below examples/
    random: float
    before: Former | None = None

    @property
    def path(self) -> Path:
        """The composition."""
        return ROOT / "examples" / f"{self.example}.toml"

    @property
    def environment(self) -> str:
        """The composition's."""
        return str(read_tables(self.path)["actors"]["env"])

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.algorithm} {self.environment}"

    @property
    def steps(self) -> int:
        """Five times the composition's."""
        return LONGER * int(read_tables(self.path)["program"]["timesteps"])

    @property
    def variants(self) -> tuple[str, ...]:
        """Which settings run."""
        return (AFTER,) if self.before is None else (BEFORE, AFTER)

    @property
    def plot(self) -> str:
        """Name of the picture of its curves."""
        return f"stability_{self.name.lower().replace(' ', '_').replace('-', '_')}.png"

    @property
    def interval(self) -> int:
        """Environment steps between evaluations."""
        return self.steps // EVALUATIONS


_FORMER_CARTPOLE = {
    "exploration": EpsilonGreedy(start=1.0, end=0.04, steps=3_000),
    "hidden_sizes": (64, 64),
    "learning_rate": 2.3e-3,
    "replay_ratio": 64.0,
    "n_step": 1,
    "target_update_interval": 100,
    "learning_rate_schedule": "constant",
}
_FORMER_LANDER = {"hidden_sizes": (64, 64), "replay_ratio": 8.0, "n_step": 1, "learning_rate_schedule": "constant"}
TASKS = (
    Task("DQN", "cartpole", 22.0, Former(1, _FORMER_CARTPOLE)),
    Task("DQN", "zoo/dqn-LunarLander-v3", -180.0, Former(8, _FORMER_LANDER)),
    Task("SAC", "zoo/sac-Pendulum-v1", -1_220.0),
    Task("TD3", "zoo/td3-Pendulum-v1", -1_220.0),
)

Curves = dict[str, np.ndarray]  # by the settings' name: mean returns (seeds, evaluations)


def compose(task: Task, variant: str, folder: Path) -> Path:
    """The program; composing measures the parts, but tries no whole programs."""
    path = folder / f"{task.name}_{variant}.py".replace(" ", "_").replace("-", "_")
    composer: Any
    if variant == BEFORE:
        assert task.before is not None
        former = task.before
        composer = composer_of(folder, DQN, task.environment, former.envs, 100_000, {}, **former.settings)
    else:
        composer, _ = load_spec(task.path, progress=False)
    composer.run(budget_s=0)
    program: Path = composer.runtime_gen(path=path, timesteps=task.steps)
    return program


def run(program: Path, task: Task, seed: int) -> np.ndarray:
    """Mean returns of the greedy evaluations `(EVALUATIONS,)` of one run; NaN before the first gradient step."""
    folder = program.with_suffix("") / str(seed)
    arguments = ("--seed", seed, "--eval-interval", task.interval, "--eval-episodes", EPISODES)
    run_program(program, *arguments, "--until-return", "none", "--run-dir", folder)
    found = np.full(EVALUATIONS, np.nan)
    with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = int(row["env_steps"]) // task.interval - 1
            if row["kind"] == "progress" and place < EVALUATIONS and np.isnan(found[place]):
                found[place] = float(row["mean_return"])
    return found


def measure(task: Task, seeds: int, folder: Path) -> Curves:
    """All variants, in turn."""
    programs = {name: compose(task, name, folder) for name in task.variants}
    found: dict[str, list[np.ndarray]] = {name: [] for name in programs}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name, program in programs.items():
            found[name].append(run(program, task, seed))
            thirds = ", ".join(f"{mean:.1f}" for mean in thirds_of(found[name][-1][None])[0])
            print(f"{task.name:24} {name:8} seed {seed}  means of the thirds {thirds}", flush=True)
    return {name: np.stack(curves) for name, curves in found.items()}


def thirds_of(curves: np.ndarray) -> np.ndarray:
    """Means `(seeds, 3)` over the thirds of the curves `(seeds, evaluations)`."""
    return np.stack([np.nanmean(part, axis=1) for part in np.split(curves, 3, axis=1)], axis=1)


def rows_of(task: Task, curves: Curves) -> Iterator[Row]:
    """The last third of the evaluations, and the share that it keeps of the best third."""
    thirds = {name: thirds_of(found) for name, found in curves.items()}
    last = {name: means[:, -1] for name, means in thirds.items()}
    kept = {
        name: 100.0 * (means[:, -1] - task.random) / (means.max(axis=1) - task.random) for name, means in thirds.items()
    }
    for what, unit, values in (("mean return of the last third", "return", last), ("share kept", "%", kept)):
        peer = ""
        if BEFORE in values:
            low, high = values[BEFORE].min(), values[BEFORE].max()
            peer = f"settings before ({low:.0f} to {high:.0f})"
        case = f"{task.name}, {task.steps:,} steps: {what}"
        yield Row.of(case, unit, "higher", values[AFTER], peer, values.get(BEFORE))


def plot(task: Task, curves: Curves) -> None:
    """Medians over the seeds, and bands from the lowest to the highest."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    steps = task.interval * np.arange(1, EVALUATIONS + 1)
    for name, found in curves.items():
        seen = ~np.isnan(found).all(axis=0)
        values = found[:, seen]
        (line,) = axes.plot(steps[seen], np.nanmedian(values, axis=0), label=name)
        axes.fill_between(
            steps[seen], np.nanmin(values, axis=0), np.nanmax(values, axis=0), alpha=0.2, color=line.get_color()
        )
    axes.set(xlabel="environment steps", ylabel=f"mean return of {EPISODES} greedy episodes", title=task.name)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(ASSETS / task.plot, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = options(__doc__, "one seed of CartPole-v1")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each task (default: 5)")
    parser.add_argument(
        "--only",
        choices=[task.name for task in TASKS],
        action="append",
        help="these tasks; the record keeps the others, and says of which commit they are",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as scratch:
            shown(rows_of(TASKS[0], measure(TASKS[0], 1, Path(scratch))))
        return
    for task in TASKS:
        if arguments.only is None or task.name in arguments.only:
            with tempfile.TemporaryDirectory() as scratch:
                curves = measure(task, arguments.seeds, Path(scratch))
            plot(task, curves)
            record(task, shown(rows_of(task, curves)), curves)


def record(task: Task, found: Sequence[Row], curves: Curves) -> None:
    """Write the record, where this task replaces its former results."""
    thirds = ("first third", "second third", "last third")
    new = [
        {
            "task": task.name,
            "settings": name,
            "seed": FIRST_SEED + n,
            **dict(zip(thirds, means.round(1).tolist(), strict=True)),
        }
        for name, of_all in curves.items()
        for n, means in enumerate(thirds_of(of_all))
    ]
    rows, runs, origins = with_others("stability", [task.name], [t.name for t in TASKS], found, new, "task")
    plots = [
        {"file": task.plot, "title": f"{task.name}: median and range of the seeds"}
        for task in TASKS
        if (ASSETS / task.plot).exists()
    ]
    write("stability", "make bench-stability", os.cpu_count() or 1, rows, plots=plots, runs=runs, **origins)


if __name__ == "__main__":
    main()
