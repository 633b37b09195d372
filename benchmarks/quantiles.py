"""QRDQN and TQC: the time of a training step, and the time until an environment is solved, beside sb3-contrib's.

A step samples and gathers its batch itself, uniformly from a full replay of 10,000 transitions, and trains on it: ours
by setting 2's loop in C++ with the native learner, sb3-contrib's by its `train()`. Rows against "pearl on torch" are
steps of this project's torch learner on a given batch, so without sampling. All sides have one thread on one core and
take turns; the fastest slice of each turn counts. sb3-contrib's `train()` of QRDQN is not double, as ours.

Until solved: CartPole-v1 (475) and Pendulum-v1 (-200), with the settings of RL Zoo's qrdqn.yml and tqc.yml on both
sides, which `Composer.set_zoo` takes over; TQC has two critics there. The rule is that of `solve_time`: 20 greedy
episodes every 1,000 environment steps, and 20 others when their mean reaches the goal. Seconds are those of the whole
process: ours of the composed program, whose Actor and Learner share both cores, without composing it; sb3-contrib's
with one thread of torch. A run that did not solve its environment counts with all of its steps and time: its row says
so.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks import workload
from benchmarks.peers import training
from benchmarks.peers.zoo_settings import settings_of
from benchmarks.record import Row, shown, write
from benchmarks.timing import fastest, microseconds, one_thread, options
from benchmarks.until_solved import Outcome, rows_of, run_ours, run_theirs
from benchmarks.workload import Filled, Loop
from pearl import _native, algorithms
from pearl.backends.cpu.learner import NativeLearner
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import DataStorage, make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

SLOTS = 10_000
PUBLICATION_INTERVAL = 100
SLICE_S, TURN_S, REPEATS = 0.02, 0.4, 11
PEER = "sb3_training"
SHAPES = {"CartPole-v1": (4, 2), "Pendulum-v1": (3, 1)}  # numbers of an observation; actions, or numbers of one
CASES = (
    training.Case("qrdqn", "CartPole-v1", (64, 64), 32, SLOTS, quantiles=25),
    training.Case("qrdqn", "CartPole-v1", (256, 256), 64, SLOTS, quantiles=10),
    training.Case("qrdqn", "CartPole-v1", (256, 256), 128, SLOTS, quantiles=200),
    training.Case("tqc", "Pendulum-v1", (64, 64), 64, SLOTS, quantiles=25),
    training.Case("tqc", "Pendulum-v1", (256, 256), 256, SLOTS, quantiles=25),
    training.Case("tqc", "Pendulum-v1", (256, 256), 256, SLOTS, quantiles=25, critics=5),
)
TASKS = (("qrdqn", "CartPole-v1", 475.0), ("tqc", "Pendulum-v1", -200.0))
SEEDS = 5


def name_of(case: training.Case) -> str:
    """Algorithm and sizes, as tables show them."""
    critics = f"{case.critics} critics of " if case.algorithm == "tqc" else ""
    shape = "x".join(map(str, case.hidden))
    return f"{case.algorithm.upper()} step {shape} B={case.batch}, {critics}{case.quantiles} quantiles"


def trainer_of(case: training.Case) -> Any:
    """Ours."""
    floats, actions = SHAPES[case.environment]
    obs = spaces.Box(-1.0, 1.0, (floats,), np.float32)
    settings: dict[str, Any] = {"hidden_sizes": case.hidden, "num_quantiles": case.quantiles}
    if case.algorithm == "qrdqn":
        return algorithms.QRDQN(obs, spaces.Discrete(actions), max_grad_norm=0.0, **settings)
    box = spaces.Box(-1.0, 1.0, (actions,), np.float32)
    return algorithms.TQC(obs, box, num_critics=case.critics, **settings)


def loop_of(case: training.Case) -> Loop:
    """Setting 2's loop in C++, with the native learner and a full replay."""

    def make(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
        return make_replay_manager(ReplaySpec(slots, mode="uniform"), seed=0), DataStorage(spec, slots)

    trainer = trainer_of(case)
    return Loop(NativeLearner(trainer), Filled.of(trainer, SLOTS, make), case.batch, PUBLICATION_INTERVAL)


def measure(case: training.Case, repeats: int) -> Iterator[Row]:
    """A row for sb3-contrib and one for our torch learner."""
    loop, learner = loop_of(case), TorchLearner(trainer_of(case))
    spec = TransitionSpec.from_spaces(learner.trainer.observation_space, learner.trainer.action_space)
    batch = workload.transitions(spec, case.batch, np.random.default_rng(0)), np.ones(case.batch, np.float32)
    step = partial(learner.step, *batch)
    count = max(1, round(SLICE_S * 1e6 / loop.run(20)))
    steps = max(1, round(SLICE_S * 1e6 / microseconds(step, 3)))
    native, in_torch, theirs = [], [], []
    with ExitStack() as stack:
        side = stack.enter_context(training.Side(PEER, case, "sb3-contrib"))
        for _ in range(repeats):
            native.append(fastest(partial(loop.run, count), TURN_S))
            in_torch.append(fastest(partial(microseconds, step, steps), TURN_S))
            if not side.reason:
                rates = [side.train(SLICE_S * 2) for _ in range(round(TURN_S / SLICE_S / 2))]
                theirs.append(case.batch * 1e6 / max(rates))
    yield Row.of(name_of(case), "us", "lower", native, side.name, theirs, side.reason)
    yield Row.of(name_of(case), "us", "lower", native, "pearl on torch, without sampling", in_torch)


def program_of(folder: Path, algorithm: str, env: str) -> Path:
    """The program composed from the settings of RL Zoo, as a file of its own form."""
    from pearl import Composer

    settings, steps = settings_of(algorithm, env)
    kwargs = settings.pop("policy_kwargs", None)
    entry = {"n_timesteps": steps, "policy": "MlpPolicy", **settings}
    if kwargs:
        entry["policy_kwargs"] = f"dict({', '.join(f'{name}={value!r}' for name, value in kwargs.items())})"
    file = folder / f"{algorithm}.yml"
    file.write_text(json.dumps({env: entry}), encoding="utf-8")  # which is YAML
    composer = Composer(progress=False, calibration=folder / "calibration.json")
    composer.set_zoo(file, env)
    composer.run(budget_s=0)
    return Path(composer.runtime_gen(path=folder / "program.py", timesteps=steps))


def solve(algorithm: str, env: str, goal: float, seeds: int) -> Iterator[Row]:
    """Steps and seconds until solved, seed by seed in turn."""
    import sb3_contrib

    peer = f"sb3-contrib {sb3_contrib.__version__}"
    runs: dict[str, list[Outcome]] = {"ours": [], peer: []}
    arguments = ("--algorithm", algorithm, "--environment", env, f"--goal={goal}")
    with tempfile.TemporaryDirectory() as folder:
        program = program_of(Path(folder), algorithm, env)
        for seed in range(1, 1 + seeds):
            runs["ours"].append(run_ours(program, goal, seed))
            runs[peer].append(run_theirs(peer, "sb3_solve", *arguments, "--seed", seed))
            print(f"{algorithm} {env}, seed {seed}: { ({who: found[-1] for who, found in runs.items()}) }", flush=True)
    yield from rows_of(f"{algorithm.upper()} {env}", runs)


def main() -> None:
    """Measure, and write the record."""
    parser = options(__doc__, "one step and one seed of each algorithm")
    quick = parser.parse_args().quick
    one_thread("benchmarks.quantiles", pinned=False)
    rows: list[Row] = []
    for task in TASKS:
        rows += shown(solve(*task, 1 if quick else SEEDS))
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    for case in (CASES[0], CASES[3]) if quick else CASES:
        rows += shown(measure(case, 3 if quick else REPEATS))
    os.sched_setaffinity(0, cores)  # a record counts the cores that can be used
    if not quick:
        note = f"Kernels: {_native.selected_learner_kernels()}."
        print(write("quantiles", "make bench-quantiles", 1, rows, note=note))


if __name__ == "__main__":
    main()
