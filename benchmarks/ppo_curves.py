"""PPO's learning curves, of composed programs and of Stable-Baselines3, both with the settings of its RL Zoo.

Every run plays 10 greedy episodes 20 times. Rows compare, over the seeds, the interquartile means of the last
evaluation, and of the mean of the last five, with bootstrap intervals of 95 %. The last row is the probability that a
run of ours ends higher than one of theirs, averaged over the environments: 50 % if both learn alike. RL Zoo chose its
settings on Stable-Baselines3; nothing was chosen on these seeds.

Finished runs are kept in benchmarks/results/ppo_curves, theirs by the version: another benchmark makes ours alone.
Ours are kept by the commit, so that a benchmark that was interrupted goes on where it was.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.intervals import interquartile_mean, interval, probability_of_improvement
from benchmarks.peers.zoo_ppo import TASKS, ZooTask
from benchmarks.programs import environment, run_program
from benchmarks.record import ASSETS, RESULTS, ROOT, Row, commit, shown, write
from benchmarks.timing import options

EVALUATIONS, EPISODES, LAST = 20, 10, 5
SIDES = ("ours", "theirs")


def compose(task: ZooTask, path: Path) -> Path:
    """The composed program of a task, as RL Zoo has it: one actor with all environments, in turn with training."""
    from pearl import Composer
    from pearl.algorithms import PPO

    composer = Composer(progress=False, calibration=path.parent / "calibration.json")
    composer.set_actors(1, env=task.environment, envs_per_actor=task.envs)
    composer.set_train_function(
        learner=PPO,
        hidden_sizes=task.hidden,
        activation=task.activation,
        learning_rate=task.learning_rate,
        learning_rate_schedule=task.schedule,
        clip_range=task.clip_range,
        clip_range_schedule=task.schedule,
        entropy_coefficient=task.entropy,
        value_coefficient=task.value,
        max_grad_norm=task.max_grad_norm,
        normalize_observations=task.normalized,
        initial_log_std=task.initial_log_std,
        orthogonal=task.orthogonal,
    )
    rewards = "returns" if task.normalized else "none"
    composer.set_rollout(
        horizon=task.horizon, epochs=task.epochs, gae_lambda=task.gae_lambda, reward_standardization=rewards
    )
    composer.set_training(batch_size=task.batch_size, gamma=task.gamma)
    composer.run(budget_s=0)  # where it runs is not the question
    program: Path = composer.runtime_gen(path=path, timesteps=task.steps)
    return program


@dataclass(frozen=True)
class Job:
    """One run of one side; `program` is that of ours."""

    task: ZooTask
    steps: int
    side: str
    seed: int
    program: Path
    folder: Path

    @property
    def kept(self) -> Path:
        """The file of the finished run."""
        return self.folder / f"{self.task.environment}-{self.steps}-{self.seed}.json"

    def returns(self) -> list[float]:
        """The mean returns of the evaluations, from an earlier benchmark if that has made them."""
        if not self.kept.exists():
            found = (self._ours if self.side == "ours" else self._theirs)()
            if len(found) < EVALUATIONS:
                raise RuntimeError(f"{self.kept.name} has {len(found)} evaluations; expected {EVALUATIONS}")
            self.kept.write_text(json.dumps(found), encoding="utf-8")
            print(f"{self.side:6} {self.task.environment:16} seed {self.seed}  last {found[-1]:9.1f}", flush=True)
        returns: list[float] = json.loads(self.kept.read_text(encoding="utf-8"))
        return returns

    @property
    def _interval(self) -> int:
        return self.steps // EVALUATIONS

    def _ours(self) -> list[float]:
        folder = self.program.with_suffix("") / str(self.seed)
        arguments = ("--seed", self.seed, "--timesteps", self.steps, "--until-return", "none", "--plain")
        evaluations = ("--eval-interval", self._interval, "--eval-episodes", EPISODES)
        run_program(self.program, *arguments, *evaluations, "--run-dir", folder)
        with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["kind"] in ("progress", "last")]
        by_steps = {int(row["env_steps"]): float(row["mean_return"]) for row in rows}
        return list(by_steps.values())[-EVALUATIONS:]

    def _theirs(self) -> list[float]:
        command = [sys.executable, "-m", "benchmarks.peers.sb3_ppo_curve", self.task.environment]
        command += ["--seed", str(self.seed), "--steps", str(self.steps), "--interval", str(self._interval)]
        command += ["--episodes", str(EPISODES)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.kept.name}: {done.stderr[-1000:]}")
        lines = (line for line in done.stdout.splitlines() if line.startswith("{"))
        return [float(json.loads(line)["return"]) for line in lines][-EVALUATIONS:]


Curves = dict[str, np.ndarray]  # by side: mean returns (seeds, evaluations)


def curves_of(task: ZooTask, seeds: int, steps: int, sides: Sequence[str], runs: Path, scratch: Path) -> Curves:
    """All runs of a task, as many at a time as there are cores; finished ones are kept in `runs`."""
    folders = {"ours": runs / f"pearl-{commit()}", "theirs": runs / f"stable-baselines3-{_sb3()}"}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    program = scratch / f"{task.environment}.py"
    jobs = [Job(task, steps, side, seed, program, folders[side]) for seed in range(1, seeds + 1) for side in sides]
    if any(job.side == "ours" and not job.kept.exists() for job in jobs):
        compose(task, program)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(Job.returns, jobs))
    by_side = {side: [r for job, r in zip(jobs, found, strict=True) if job.side == side] for side in sides}
    return {side: np.array(curves) for side, curves in by_side.items()}


def _sb3() -> str:
    return importlib.metadata.version("stable-baselines3")


_SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last evaluation": lambda curves: curves[:, -1],
    f"mean of the last {LAST} evaluations": lambda curves: curves[:, -LAST:].mean(axis=1),
}


def rows_of(task: ZooTask, steps: int, curves: Curves) -> Iterator[Row]:
    """Both scores, with the intervals of both sides."""
    for what, score in _SCORES.items():
        ours, theirs = (score(curves[side]) for side in SIDES)
        mine, other = interval(ours), interval(theirs)
        shared = mine[0] <= other[1] and other[0] <= mine[1]
        how = "intervals overlap" if shared else "INTERVALS DO NOT OVERLAP"
        peer = f"stable-baselines3 {_sb3()} ({other[0]:.1f} to {other[1]:.1f}; {how})"
        case = f"{task.environment}, {steps:,} steps, {what}"
        middle, their_middle = (float(interquartile_mean(scores)) for scores in (ours, theirs))
        yield Row(case, middle, "return", "higher", mine, len(ours), peer, their_middle)


def improvement_row(all_curves: Sequence[Curves]) -> Row:
    """How probably a run of ours ends higher."""
    score = _SCORES[f"mean of the last {LAST} evaluations"]
    ours, theirs = ([score(curves[side]) for curves in all_curves] for side in SIDES)
    middle, (low, high) = probability_of_improvement(ours, theirs)
    case = f"a run of ours ends higher (mean of the last {LAST} evaluations)"
    n = sum(map(len, ours))
    return Row(case, 100 * middle, "%", "higher", (100 * low, 100 * high), n, "equal learning", 50.0)


def plot(tasks: Sequence[ZooTask], all_curves: Sequence[Curves]) -> dict[str, str]:
    """A panel per environment: interquartile means, and their intervals."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, -(-len(tasks) // 2), figsize=(12.0, 6.4), layout="constrained", squeeze=False)
    for axes, task, curves in zip(panels.flat, tasks, all_curves, strict=False):
        steps = task.steps / EVALUATIONS * np.arange(1, EVALUATIONS + 1) / 1000
        for side, label in zip(SIDES, ("PEARL", "Stable-Baselines3"), strict=True):
            (line,) = axes.plot(steps, interquartile_mean(curves[side], axis=0), label=label)
            low, high = np.transpose([interval(column) for column in curves[side].T])
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        axes.set(xlabel="thousand environment steps", title=task.environment)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel(f"return of {EPISODES} greedy episodes")
    panels[0, 0].legend()
    figure.savefig(ASSETS / "ppo_curves.png", dpi=110)
    plt.close(figure)
    title = "PPO with RL Zoo's settings: interquartile means over the seeds, and bootstrap intervals"
    return {"file": "ppo_curves.png", "title": title}


def main() -> None:
    parser = options(__doc__, "two seeds of CartPole-v1 for 20,000 steps")
    names = [task.environment for task in TASKS]
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help="these environments; writes nothing")
    parser.add_argument("--side", choices=SIDES, help="make the runs of one side; compares and writes nothing")
    parser.add_argument(
        "--runs", type=Path, default=RESULTS / "ppo_curves", metavar="FOLDER", help="keeps finished runs"
    )
    arguments = parser.parse_args()
    tasks = [task for task in TASKS if task.environment in (arguments.only or names)]
    tasks = tasks[:1] if arguments.quick else tasks
    sides = (arguments.side,) if arguments.side else SIDES
    found, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        runs = scratch if arguments.quick else arguments.runs
        for task in tasks:
            seeds, steps = (2, 20_000) if arguments.quick else (task.seeds, task.steps)
            found.append(curves_of(task, seeds, steps, sides, runs, scratch))
            if not arguments.side:
                rows += shown(rows_of(task, steps, found[-1]))
    if arguments.side:
        return
    rows += shown([improvement_row(found)])
    if not arguments.quick and len(tasks) == len(TASKS):
        write("ppo_curves", "make bench-ppo-curves", os.cpu_count() or 1, rows, plots=[plot(tasks, found)])


if __name__ == "__main__":
    main()
