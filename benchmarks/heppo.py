"""HEPPO-GAE's Table III: PPO's returns with the paper's five ways to standardise and quantise rewards and values.

Each of the five experiments is a composed program that differs in its RolloutSpec alone, trained with the same seeds on
the same number of steps. "ours" is the interquartile mean over the seeds of the last weights' mean greedy return (20
episodes), with a bootstrap interval of 95 % as spread; "theirs" is that of experiment 1, plain PPO. The rows "training
returns" do the same with the mean of the last 100 training episodes, which the paper plots (Fig. 7, 10). No setting was
chosen on these seeds.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.intervals import interquartile_mean, interval
from benchmarks.programs import run_program
from benchmarks.record import Row, shown, write
from benchmarks.timing import options

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "1: plain PPO": {},
    "2: dynamic rewards": {"reward_standardization": "dynamic"},
    "3: blocks restored, 8 bits": {
        "reward_standardization": "block_restored",
        "value_standardization": "block",
        "quantization_bits": 8,
    },
    "4: reward blocks kept, 8 bits": {
        "reward_standardization": "block",
        "value_standardization": "block",
        "quantization_bits": 8,
    },
    "5: dynamic rewards, value blocks, 8 bits": {
        "reward_standardization": "dynamic",
        "value_standardization": "block",
        "quantization_bits": 8,
    },
}
ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5")
EPISODES = 20


@dataclass(frozen=True)
class Job:
    """One run: a program with a seed."""

    program: Path
    seed: int
    steps: int

    def scores(self) -> tuple[float, float]:
        """The last weights' mean greedy return, and the mean of the last 100 training episodes."""
        folder = self.program.parent / f"{self.program.stem}-{self.seed}"
        arguments = ("--seed", self.seed, "--timesteps", self.steps, "--run-dir", folder, "--plain")
        evaluation = ("--eval-episodes", EPISODES, "--eval-interval", 10 * self.steps, "--until-return", "none")
        run_program(self.program, *arguments, *evaluation)
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return float(summary["last"]["mean"]), _training_return(folder)


def _training_return(folder: Path) -> float:
    lines = (folder / "episodes.csv").read_text(encoding="utf-8").splitlines()
    column = lines[0].split(",").index("return")
    return float(np.mean([float(line.split(",")[column]) for line in lines[1:][-100:]]))


def compose(environment: str, settings: dict[str, Any], path: Path) -> Path:
    """Write an experiment's program: one actor with 8 environments, CleanRL's defaults for continuous control."""
    from pearl import Composer
    from pearl.algorithms import PPO

    composer = Composer(progress=False, calibration=path.parent / "calibration.json")
    composer.set_actors(1, env=environment, envs_per_actor=8)
    composer.set_train_function(learner=PPO, normalize_observations=True, learning_rate_schedule="linear")
    composer.set_rollout(horizon=256, epochs=10, **settings)
    composer.set_training(batch_size=64)
    advantages, learner = composer.run()
    return composer.runtime_gen(advantages, learner, path, timesteps=300_000)


def row(case: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Interquartile means of both, and the interval of ours."""
    middle, other = (float(interquartile_mean(np.asarray(scores))) for scores in (ours, theirs))
    return Row(case, middle, "return", "higher", interval(ours), len(ours), "experiment 1", other)


def measure(environments: Sequence[str], seeds: Sequence[int], steps: int, folder: Path) -> Iterator[Row]:
    """All experiments of each environment; as many runs at a time as there are cores."""
    workers = os.cpu_count() or 1
    for environment in environments:
        programs = [
            compose(environment, settings, folder / f"{environment}_{number}.py")
            for number, settings in enumerate(EXPERIMENTS.values(), 1)
        ]
        jobs = [Job(program, seed, steps) for seed in seeds for program in programs]
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(Job.scores, jobs))
        scores = np.array(found).reshape(len(seeds), len(programs), 2)
        for number, name in enumerate(EXPERIMENTS):
            for kind, what in enumerate(("", ", training returns")):
                case = f"{environment}, {steps:,} steps, {name}{what}"
                yield row(case, scores[:, number, kind].tolist(), scores[:, 0, kind].tolist())


def main() -> None:
    parser = options(__doc__, "two seeds of 20,000 steps")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how many seeds, from 101 on")
    parser.add_argument("--steps", type=int, default=300_000, metavar="N", help="environment steps of each run")
    parser.add_argument("--environments", nargs="*", default=list(ENVIRONMENTS), metavar="NAME")
    arguments = parser.parse_args()
    seeds, steps = (2, 20_000) if arguments.quick else (arguments.seeds, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        rows = shown(measure(arguments.environments, range(101, 101 + seeds), steps, Path(folder)))
    if not arguments.quick:
        write("heppo", "make bench-heppo", threads=os.cpu_count() or 1, rows=rows)


if __name__ == "__main__":
    main()
