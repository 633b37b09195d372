"""Returns per environment step and per second of SAC, REDQ and DroQ, each as a composed program.

SAC trains once per environment step, REDQ and DroQ 20 times. Runs take turns, seed by seed, and `--folder` keeps them:
a later call makes only those that are missing. `--learners` compares a training step of the native learner with one of
torch's instead. It prints the tables of docs/sample_efficiency.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import run_program
from benchmarks.timing import ONE_THREAD
from pearl.algorithms import REDQ, SAC, DroQ

EPISODES = 5  # per evaluation
TRAINERS: dict[str, tuple[type, dict[str, object]]] = {
    "SAC": (SAC, {}),
    "DroQ": (DroQ, {}),
    "REDQ": (REDQ, {}),
}


def compose(name: str, folder: Path, arguments: argparse.Namespace) -> Path:
    """The program of an algorithm: one environment, uniform replay, networks of two hidden layers of equal width."""
    from pearl import Composer

    trainer, settings = TRAINERS[name]
    composer = Composer(progress=False)
    composer.set_actors(1, env=arguments.env, envs_per_actor=1)
    shared: dict[str, Any] = {
        "hidden_sizes": (arguments.width, arguments.width),
        "target_entropy": arguments.target_entropy,
    }
    composer.set_train_function(learner=trainer, **{**shared, **settings})
    composer.set_replay(arguments.steps, mode="uniform")
    composer.set_training(learning_starts=arguments.learning_starts)
    composer.run(budget_s=0)
    print(name, composer.placement.learner, composer.placement.implementation, file=sys.stderr, flush=True)
    program: Path = composer.runtime_gen(path=folder / f"{name.lower()}.py", timesteps=arguments.steps)
    return program


def run(program: Path, folder: Path, seed: int, interval: int) -> None:
    """One run; its CPU time is written last, which marks it as complete."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ("--seed", seed, "--eval-interval", interval, "--eval-episodes", EPISODES, "--until-return", "none")
    run_program(program, *options, "--run-dir", folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (folder / "cpu.json").write_text(json.dumps({"cpu_s": spent}), encoding="utf-8")


def curve(folder: Path, steps: int, interval: int) -> np.ndarray:
    """Mean returns and seconds since the start `(steps // interval, 2)` of the greedy evaluations of a run."""
    found = np.full((steps // interval, 2), np.nan)
    with (folder / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = int(row["env_steps"]) // interval - 1
            if row["kind"] == "progress" and 0 <= place < len(found) and np.isnan(found[place, 0]):
                found[place] = float(row["mean_return"]), float(row["wall_s"])
    return found


def tables(folder: Path, arguments: argparse.Namespace) -> None:
    """Print mean returns by environment steps, and the cost of the runs."""
    steps, interval = arguments.steps, arguments.interval
    runs = {
        name: sorted(done.parent for done in (folder / name).glob("*/cpu.json"))
        for name in TRAINERS
        if list((folder / name).glob("*/cpu.json"))
    }
    curves = {name: np.stack([curve(one, steps, interval) for one in found]) for name, found in runs.items()}
    print(f"\n| environment steps | {' | '.join(curves)} |\n|---:|{'---:|' * len(curves)}")
    for place in range(steps // interval):
        cells = []
        for found in curves.values():
            returns, seconds = found[:, place, 0], found[:, place, 1]
            if np.isnan(returns).all():
                cells.append("")
                continue
            each = ", ".join(f"{value:.0f}" for value in returns)
            cells.append(f"{np.nanmean(returns):.0f} ({each}) at {np.nanmean(seconds):.0f} s")
        print(f"| {(place + 1) * interval:,} | {' | '.join(cells)} |")
    print("\n| | runs | gradient steps | wall s | CPU s |\n|---|---:|---:|---:|---:|")
    for name, done in runs.items():
        summaries = [json.loads((one / "summary.json").read_text(encoding="utf-8")) for one in done]
        spent = [json.loads((one / "cpu.json").read_text(encoding="utf-8"))["cpu_s"] for one in done]
        gradient_steps = np.mean([summary["gradient_steps"] for summary in summaries])
        wall = np.mean([summary["wall_s"] for summary in summaries])
        print(f"| {name} | {len(done)} | {gradient_steps:,.0f} | {wall:.0f} | {np.mean(spent):.0f} |")


def learners(widths: tuple[int, ...]) -> None:
    """Print the shortest times of a step of 256 transitions of Hopper's sizes by each learner, which take turns."""
    import torch
    from gymnasium import spaces

    from pearl.backends.cpu.learner import NativeLearner
    from pearl.learner.torch_learner import TorchLearner

    rng = np.random.default_rng(0)
    rows, boxes = 256, (spaces.Box(-10, 10, (11,), np.float32), spaces.Box(-1, 1, (3,), np.float32))
    batch = {
        "obs": rng.normal(size=(rows, 11)).astype(np.float32),
        "action": rng.uniform(-1, 1, (rows, 3)).astype(np.float32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": rng.normal(size=(rows, 11)).astype(np.float32),
        "discount": np.full(rows, 0.99, np.float32),
    }
    weights = np.ones(rows, np.float32)
    print("| hidden layers | algorithm | native ms | torch ms | ratio |\n|---|---|---:|---:|---:|")
    for width in widths:
        for name, (trainer, settings) in TRAINERS.items():
            own = {"hidden_sizes": (width, width), **settings}
            made = [kind(trainer(*boxes, **own)) for kind in (NativeLearner, TorchLearner)]
            for learner in made:
                learner.prepare()
            torch.set_num_threads(1)
            delay = int(getattr(trainer, "policy_delay", 1))
            # Shortest times of steps without and with a step of the policy: other programs may share the cores.
            shortest = np.full((2, 2), np.inf)
            for number in range(1, 201):
                for which, learner in enumerate(made):
                    began = time.perf_counter()
                    learner.step(batch, weights)
                    spent, moves = 1e3 * (time.perf_counter() - began), int(number % delay == 0)
                    shortest[which, moves] = min(shortest[which, moves], spent)
            share = 1 / delay
            means = [share * found[1] + ((1 - share) * found[0] if delay > 1 else 0.0) for found in shortest]
            native, by_torch = means
            print(f"| 2 x {width} | {name} | {native:.2f} | {by_torch:.2f} | {by_torch / native:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Hopper-v5")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--interval", type=int, default=2_500, help="environment steps between evaluations")
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--target-entropy", type=float, default=-1.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--algorithms", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--folder", type=Path, default=Path("runs") / "sample_efficiency")
    parser.add_argument("--learners", action="store_true", help="time the steps of both learners, run nothing")
    parser.add_argument("--report", action="store_true", help="print the tables of what is there, run nothing")
    arguments = parser.parse_args()
    os.environ.update(ONE_THREAD)
    if arguments.learners:
        learners((64, 256))
        return
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    programs: dict[str, Path] = {}
    for seed in range(1, arguments.seeds + 1):
        for name in () if arguments.report else arguments.algorithms:
            place = folder / name / str(seed)
            if (place / "cpu.json").exists():
                continue
            if name not in programs:
                programs[name] = compose(name, folder, arguments)
            run(programs[name], place, seed, arguments.interval)
            print(f"{name} seed {seed} done", file=sys.stderr, flush=True)
    tables(folder, arguments)


if __name__ == "__main__":
    main()
