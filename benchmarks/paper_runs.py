"""The papers' experiments that need a run, on this machine: `make bench-paper`.

- `placements` (PEARL Fig. 10 and Table IV, with the networks and sizes of its Table III): the program of every choice
  of devices, each with its fastest Learner by the prediction, run with `--bench`. The peer is the prediction.
- `steps` (PEARL Fig. 9): gradient steps of those networks, one thread; the Nature CNN in torch, the others native.
- `delays` (thesis Fig. 4.8): DQN on CartPole-v1 in setting 1, the Replay Manager on the CPU and the Learner on SYCL's
  CPU device, at several priority update delays: the throughput with `--bench`, and the mean return over 20 greedy
  episodes of the last weights, and of the best ones (other episodes than those that selected them).
- `curves` (PEARL Fig. 11, CF'22's LunarLander): mean returns of 10 greedy episodes during training, against environment
  steps and seconds since the program's training began; those of the peer leave its evaluations out. The peer is
  Stable-Baselines3 with the settings of its RL Zoo, stopped by time. The row is the best evaluation of a seed; the
  peer's is the best within its time.

All processes use all cores; those of Stable-Baselines3 use one thread of torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks import pong
from benchmarks.model import machine_files
from benchmarks.programs import bench, composer_of, environment, run_program
from benchmarks.record import Row, shown, write
from benchmarks.timing import alternate_calls
from benchmarks.wide_car import ENV as WIDE_CAR
from benchmarks.wide_car import WideCarDDPG
from benchmarks.workload import transitions
from pearl.algorithms import DDPG, DQN
from pearl.exploration import EpsilonGreedy, OrnsteinUhlenbeck
from pearl.spec import TransitionSpec

BATCHES = (32, 512)
STEP_BATCHES = (32, 64, 128, 256, 512, 1024)
DELAYS = (0, 1, 2, 4, 8, 50, 200)
EPISODES = 10  # of an evaluation during training
LIMIT_S = 300.0  # of a program's run


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    batches: tuple[int, ...] = BATCHES
    step_batches: tuple[int, ...] = STEP_BATCHES
    delays: tuple[int, ...] = DELAYS
    repeats: int = 2  # of a program with --bench
    bench_s: float = 1.5
    seeds: int = 3
    shortened: int = 1  # training has this part of its steps
    peer_s: float = 20.0
    step_repeats: int = 11


QUICK = Plan((32,), (32, 512), (0, 8), 1, 1.0, 1, 4, 6.0, 3)


@dataclass(frozen=True)
class Problem:
    """A benchmark of PEARL's Table III; `name` is that of `benchmarks.fpga_model`'s workload."""

    name: str
    trainer: type
    env: str
    observation: tuple[int, ...]
    actions: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    slots: int = 100_000

    def missing(self) -> str:
        """Why its environment cannot be made; empty if it can."""
        return pong.missing() if self.env == pong.ENV else ""

    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observations and actions, as Table III states them."""
        pixels = len(self.observation) > 1
        observed = (
            spaces.Box(0, 255, self.observation, np.uint8)
            if pixels
            else spaces.Box(-1.0, 1.0, self.observation, np.float32)
        )
        continuous = issubclass(self.trainer, DDPG)
        acted = spaces.Box(-1.0, 1.0, (self.actions,)) if continuous else spaces.Discrete(self.actions)
        return observed, acted


CARTPOLE = {"hidden_sizes": (64,), "double": False}
PROBLEMS = (
    Problem("CartPole DQN", DQN, "CartPole-v1", (4,), 2, CARTPOLE),
    Problem("MountainCar DDPG", WideCarDDPG, WIDE_CAR, (8,), 4),
    Problem("Pong DQN", pong.PongDQN, pong.ENV, (4, 84, 84), 6, {}, 5_000),
)


@dataclass(frozen=True)
class Task:
    """A training whose returns are followed, for so many environment steps; `peer` trains on the same environment."""

    name: str
    trainer: type
    env: str
    steps: int
    interval: int  # environment steps between evaluations
    peer_interval: int
    settings: Mapping[str, Any]


_PLAIN = {"n_step": 1, "learning_rate_schedule": "constant"}  # as the papers' DQN
LEARNING = {"learning_rate": 2.3e-3, "replay_ratio": 64.0, "batch_size": 64, "target_update_interval": 100, **_PLAIN}
CARTPOLE_DQN = {
    **LEARNING,
    "hidden_sizes": (64, 64),
    "exploration": EpsilonGreedy(start=1.0, end=0.04, steps=3_000),
}
TASKS = (
    Task("CartPole DQN", DQN, "CartPole-v1", 20_000, 1_000, 2_000, CARTPOLE_DQN),
    Task(
        "MountainCar DDPG",
        DDPG,
        "MountainCarContinuous-v0",
        40_000,
        2_000,
        500,
        {
            "hidden_sizes": (256, 128),
            "actor_learning_rate": 5e-4,
            "replay_ratio": 16.0,
            "learning_starts": 8_000,
            "n_step": 5,
            "scale_observations": True,
            "exploration": OrnsteinUhlenbeck(sigma=0.4, theta=0.1, random_steps=0),
        },
    ),
    Task(
        "LunarLander DQN",
        DQN,
        "LunarLander-v3",
        200_000,
        10_000,
        2_000,
        {
            "hidden_sizes": (64, 64),
            "learning_rate": 5e-4,
            "batch_size": 64,
            "replay_ratio": 64.0,
            "target_update_interval": 500,
            **_PLAIN,
            "exploration": EpsilonGreedy(start=1.0, end=0.05, steps=20_000),
        },
    ),
)


@dataclass(frozen=True)
class Curve:
    """One training: mean greedy returns at environment steps and at seconds."""

    task: str
    side: str
    seed: int
    steps: list[int]
    seconds: list[float]
    returns: list[float]


# --- placements -----------------------------------------------------------------------------------------------------


def measure_placements(plan: Plan, folder: Path) -> Iterator[Row]:
    """EPS of the fastest program, by its prediction, of each pair of devices."""
    for problem in PROBLEMS:
        if why := problem.missing():
            print(f"left out: {problem.name}: {why}", file=sys.stderr)
            continue
        for batch in plan.batches:
            yield from _placements_of(problem, batch, plan, folder)


def _placements_of(problem: Problem, batch: int, plan: Plan, folder: Path) -> Iterator[Row]:
    composer = _composed(
        folder, problem.trainer, problem.env, {"batch_size": batch}, problem.slots, **dict(problem.settings)
    )
    fastest: dict[tuple[str, str], Any] = {}
    for candidate in composer.placement.candidates:
        known = fastest.setdefault(candidate.pair, candidate)
        if candidate.t_itr_us < known.t_itr_us:
            fastest[candidate.pair] = candidate
    for number, candidate in enumerate(fastest.values()):
        replay, learner, implementation = candidate.names
        placement = composer.placement.with_choice(
            replay_manager=replay, learner=learner, implementation=implementation
        )
        program = composer.runtime_gen(placement=placement, path=folder / f"{problem.trainer.__name__}_{number}.py")
        found = [bench(program, "--bench-seconds", plan.bench_s, limit_s=LIMIT_S) for _ in range(plan.repeats)]
        case = f"{problem.name} batch {batch}: RM on {replay}, Learner on {learner} ({implementation})"
        yield Row.of(case, "EPS", "higher", found, "predicted", [placement.free_eps])


def _composed(
    folder: Path, trainer: type, env: str, training: Mapping[str, Any], slots: int = 100_000, **settings: Any
) -> Any:
    """A composer after its run, for this machine's CPU, by its own kernels and through SYCL."""
    composer = composer_of(folder, trainer, env, 8, slots, training, **settings)
    devices, connections = machine_files(folder)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.run()
    return composer


# --- gradient steps -------------------------------------------------------------------------------------------------


def measure_steps(plan: Plan, _: Path) -> Iterator[Row]:
    """Microseconds of a gradient step of Table III's networks, batches in the host's memory."""
    import torch

    torch.set_num_threads(1)
    for problem in PROBLEMS:
        for batch in plan.step_batches:
            if problem.env == pong.ENV and batch not in BATCHES:
                continue  # seconds a step
            (samples,) = alternate_calls([_step_of(problem, batch)], plan.step_repeats, 1e-2)
            yield Row.of(f"{problem.name} batch {batch}: gradient step", "us", "lower", samples)


def _step_of(problem: Problem, batch: int) -> Callable[[], object]:
    from pearl.backends.cpu.learner import NativeLearner
    from pearl.learner.torch_learner import TorchLearner

    trainer = problem.trainer(*problem.spaces(), seed=0, **dict(problem.settings))
    rng = np.random.default_rng(0)
    spec = TransitionSpec.from_spaces(trainer.observation_space, trainer.action_space)
    columns, weights = transitions(spec, batch, rng), rng.uniform(0.1, 1.0, batch).astype(np.float32)
    learner: Any = TorchLearner(trainer) if problem.env == pong.ENV else NativeLearner(trainer)
    return partial(learner.step, columns, weights)


# --- priority update delays -----------------------------------------------------------------------------------------


def measure_delays(plan: Plan, folder: Path) -> Iterator[Row]:
    """EPS and final return of DQN on CartPole-v1 at each delay."""
    task = TASKS[0]
    for delay in plan.delays:
        composer = _composed(folder, task.trainer, task.env, {"priority_update_delay": delay}, **dict(task.settings))
        placement = composer.placement.with_choice(replay_manager="cpu0", learner="sycl:cpu0", implementation="sycl")
        program = composer.runtime_gen(
            placement=placement, path=folder / f"delay_{delay}.py", timesteps=task.steps // plan.shortened
        )
        rates = [bench(program, "--bench-seconds", plan.bench_s, limit_s=LIMIT_S) for _ in range(plan.repeats)]
        yield Row.of(f"delay {delay}: throughput", "EPS", "higher", rates)
        returns: dict[str, list[float]] = {"last": [], "best": []}
        for seed in range(1, plan.seeds + 1):
            run_dir = folder / f"delay_{delay}_{seed}"
            arguments = ("--seed", seed, "--eval-interval", task.interval, "--eval-episodes", 20, "--run-dir", run_dir)
            run_program(program, *arguments, "--until-return", "none", limit_s=LIMIT_S)
            summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
            for weights, found in returns.items():
                found.append(summary[weights]["mean"])
        for weights, found in returns.items():
            yield Row.of(f"delay {delay}: return of the {weights} weights", "return", "higher", found)


# --- learning curves ------------------------------------------------------------------------------------------------


def measure_curves(plan: Plan, peer_python: str, folder: Path) -> Iterator[tuple[Row, list[Curve]]]:
    """The curves of each task, ours and the peer's, and a row of their best evaluations."""
    for task in TASKS:
        composer = composer_of(folder, task.trainer, task.env, 8, 100_000, {}, **dict(task.settings))
        composer.run()
        steps = task.steps // plan.shortened
        program = composer.runtime_gen(path=folder / f"{task.env}.py", timesteps=steps)
        ours: list[Curve] = []
        theirs: list[Curve] = []
        reason = "" if peer_python else "not installed"
        for seed in range(1, plan.seeds + 1):
            ours.append(our_curve(task, program, seed, folder))
            if not reason:
                curve, reason = their_curve(task, peer_python, seed, plan.peer_s)
                theirs += [curve] if curve.returns else []
        best, peers = ([max(curve.returns) for curve in curves] for curves in (ours, theirs))
        case = f"{task.name} on {task.env}: best evaluation in {steps:,} steps"
        peer = f"Stable-Baselines3, RL Zoo settings, in {plan.peer_s:g} s"
        yield Row.of(case, "return", "higher", best, peer, peers, reason), [*ours, *theirs]


def our_curve(task: Task, program: Path, seed: int, folder: Path) -> Curve:
    """Run the program once and read its evaluations."""
    run_dir = folder / f"{task.env}_{seed}"
    arguments = ("--seed", seed, "--eval-interval", task.interval, "--eval-episodes", EPISODES)
    run_program(program, *arguments, "--until-return", "none", "--run-dir", run_dir, limit_s=LIMIT_S)
    with (run_dir / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "progress"]
    return Curve(
        task.name,
        "PEARL",
        seed,
        [int(row["weights_step"]) for row in rows],
        [float(row["wall_s"]) for row in rows],
        [float(row["mean_return"]) for row in rows],
    )


def their_curve(task: Task, python: str, seed: int, seconds: float) -> tuple[Curve, str]:
    """The evaluations of Stable-Baselines3 within `seconds` of training, and why there are none, if so."""
    command = [python, "-m", "benchmarks.peers.sb3_curve", task.env, "--seed", str(seed), "--episodes", str(EPISODES)]
    command += ["--steps", str(task.steps), "--interval", str(task.peer_interval), "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = "" if found else f"no evaluation within {seconds:g} s"
    if done.returncode:
        reason = f"ended with code {done.returncode}: {lines[-1][:160] if lines else 'no output'}"
    steps, times, returns = ([row[key] for row in found] for key in ("steps", "seconds", "return"))
    return Curve(task.name, "Stable-Baselines3", seed, steps, times, returns), reason


# --- all --------------------------------------------------------------------------------------------------------------

PARTS = ("placements", "steps", "delays", "curves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of each experiment; the results say so")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS, help="experiments; a part writes nothing")
    parser.add_argument("--peer-python", default="", help="the Python that has Stable-Baselines3")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    rows: list[Row] = []
    curves: list[Curve] = []
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        measures = {"placements": measure_placements, "steps": measure_steps, "delays": measure_delays}
        for part in arguments.only:
            folder, start = Path(scratch) / part, time.perf_counter()
            folder.mkdir()
            if part == "curves":
                for row, found in measure_curves(plan, arguments.peer_python, folder):
                    rows += shown([row])
                    curves += found
            else:
                rows += shown(measures[part](plan, folder))
            seconds[part] = round(time.perf_counter() - start, 1)
            print(f"{part}: {seconds[part]} s", file=sys.stderr)
    if set(arguments.only) == set(PARTS):
        command = "make bench-paper" + (" BENCH_ARGS=--quick" if arguments.quick else "")
        documents = [vars(curve) for curve in curves]
        write("paper", command, os.cpu_count() or 1, rows, quick=arguments.quick, seconds=seconds, curves=documents)


if __name__ == "__main__":
    main()
