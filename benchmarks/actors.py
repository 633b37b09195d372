"""Environment steps that an actor collects a second beside Stable-Baselines3, and what its process takes to start.

Ours and theirs take turns: collection alone on one core, collection while training on all. `--quick` is a look, which
writes nothing; without it, benchmarks/results/actors.json is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.training import environment
from benchmarks.record import Row, write
from pearl import Composer
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.environment import make_vector_env
from pearl.actors.policy_plan import read_policy
from pearl.actors.process import ActorGroup
from pearl.algorithms import DQN
from pearl.algorithms.trainer import make_trainer
from pearl.exploration import EpsilonGreedy
from pearl.ipc.queues import WeightSyncQueue
from pearl.replay.storage import DataStorage
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec

ENVIRONMENT = "CartPole-v1"
HIDDEN = (64, 64)
EPSILON = 0.1
SLOTS = 100_000
BATCH = 64
GRADIENT_STEPS = 0.5  # per environment step, while training
INSERTION_ROWS = 128
VECTORS = {"sync": "stepped one by one", "vector_entry_point": "stepped as one vector"}

Collect = Callable[[float], float]  # seconds to collect for -> environment steps a second


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    envs: tuple[int, ...] = (1, 8, 32)
    alternations: int = 15
    turn_s: float = 0.5
    starts: int = 7
    runs: int = 5
    run_steps: int = 60_000  # environment steps of a run of ours
    training_s: float = 5.0  # of one of theirs

    @classmethod
    def quick(cls) -> Plan:
        """A look."""
        return cls(alternations=3, turn_s=0.2, starts=2, runs=1, run_steps=20_000, training_s=2.0)


def setup_of(vectorization: Any, envs: int, *, native: bool = True) -> ActorSetup:
    """An actor's setup, its policy native or in torch."""
    spec = ActorSpec(ENVIRONMENT, envs_per_actor=envs, vectorization=vectorization)
    settings = {"hidden_sizes": HIDDEN, "exploration": EpsilonGreedy(EPSILON, EPSILON, 1)}
    setup = ActorSetup(DQN, settings, spec, TrainSpec(), seed=1)
    if not native:
        return setup
    known = make_vector_env(spec, 1)
    trainer = make_trainer(DQN, known.single_observation_space, known.single_action_space, seed=1, settings=settings)
    return dataclasses.replace(setup, policy=read_policy(trainer))


def transition_of(setup: ActorSetup) -> TransitionSpec:
    """What the environment's transitions hold."""
    known = make_vector_env(setup.spec, 1)
    return TransitionSpec.from_spaces(known.single_observation_space, known.single_action_space)


def ours(setup: ActorSetup) -> Collect:
    """Collection through all that a run has on the way: the DCQ, the host's buffer, the Data Storage."""
    actor, transition = Actor(setup), transition_of(setup)
    queue = DataCollectionQueue(transition, setup.message_rows(), 2)
    buffer = CollectionBuffer(transition, INSERTION_ROWS, setup.message_rows())
    storage = DataStorage(transition, SLOTS)

    def collect(seconds: float) -> float:
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            message = queue.reserve()
            assert message is not None
            queue.publish(actor.collect(message))
            taken = buffer.take(queue)
            assert taken is not None
            steps += int(taken["env_steps"][0])
            if buffer.full:
                storage.insert(buffer.take_all())
        return steps / elapsed

    return collect


def stable_baselines3(envs: int, *, trains: bool = False) -> tuple[str, Collect]:
    """Its DQN's own loop, with gradient steps switched off unless it `trains`, as often as ours."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env

    vector = make_vec_env(ENVIRONMENT, n_envs=envs, seed=1)
    # It trains after so many steps of the vector.
    every = max(1, round(1 / (GRADIENT_STEPS * envs))) if trains else 64
    model = sb3.DQN(
        "MlpPolicy",
        vector,
        learning_starts=0,
        batch_size=BATCH,
        train_freq=every,
        gradient_steps=round(GRADIENT_STEPS * envs * every) if trains else 0,
        buffer_size=SLOTS,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        policy_kwargs={"net_arch": list(HIDDEN)},
        seed=1,
        device="cpu",
    )
    chunk = 256 * envs

    def collect(seconds: float) -> float:
        before, start = model.num_timesteps, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            model.learn(chunk, reset_num_timesteps=False)
        return (model.num_timesteps - before) / elapsed

    return f"stable-baselines3 {sb3.__version__}", collect


def row(
    case: str, unit: str, better: Any, samples: list[float], peer: str = "", theirs: list[float] | None = None
) -> Row:
    """Medians, and the spread of ours: the 20th and 80th percentile, of few samples the ends."""
    low, high = (0.2, 0.8) if len(samples) > 10 else (0.0, 1.0)
    spread = float(np.quantile(samples, low)), float(np.quantile(samples, high))
    return Row(
        case, statistics.median(samples), unit, better, spread, len(samples), peer,
        statistics.median(theirs) if theirs else None,
    )  # fmt: skip


def measure_steps(plan: Plan) -> Iterator[Row]:
    """Environment steps a second of one core."""
    for envs in plan.envs:
        peer, reason = "stable-baselines3", ""
        sides: dict[str, Collect] = {name: ours(setup_of(name, envs)) for name in VECTORS}
        sides |= {f"{name} in torch": ours(setup_of(name, envs, native=False)) for name in VECTORS}
        try:
            peer, sides["theirs"] = stable_baselines3(envs)
        except ImportError as error:
            reason = f"cannot be loaded: {error}"
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(plan.alternations + 1):
            for name, collect in sides.items():
                found = collect(plan.turn_s)
                if turn:  # the first warms up
                    samples[name].append(found)
        for name, text in VECTORS.items():
            case = f"{envs} environments {text}"
            beside = row(case, "steps/s", "higher", samples[name], peer, samples.get("theirs"))
            yield dataclasses.replace(beside, reason=reason)
            yield row(case, "steps/s", "higher", samples[name], "ours in torch", samples[f"{name} in torch"])


def train(program: Path, steps: int) -> float:
    """Environment steps a second of a composed program from its start to its end, without its imports."""
    options = ["--timesteps", str(steps), "--eval-episodes", "0", "--until-return", "none", "--run-dir", "run"]
    subprocess.run(
        [sys.executable, str(program), *options], cwd=program.parent, env=environment(), check=True, capture_output=True
    )
    found = json.loads((program.parent / "run" / "summary.json").read_text(encoding="utf-8"))
    return float(found["env_steps"] / found["wall_s"])


def measure_training(plan: Plan) -> Iterator[Row]:
    """Environment steps a second while half as many gradient steps are done, on all cores."""
    for envs in plan.envs:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            composer = Composer(progress=False, calibration=folder / "calibration.json")
            composer.set_actors(1, env=ENVIRONMENT, envs_per_actor=envs)
            composer.set_train_function(learner=DQN, hidden_sizes=HIDDEN, double=False)
            composer.set_replay(SLOTS)
            composer.set_training(batch_size=BATCH, replay_ratio=GRADIENT_STEPS * BATCH)
            replay, learner = composer.run()
            program = composer.runtime_gen(
                replay=replay, learner=learner, path=folder / "program.py", timesteps=plan.run_steps
            )
            peer, reason, samples, theirs = "stable-baselines3", "", list[float](), list[float]()
            collect: Collect | None = None
            try:
                peer, collect = stable_baselines3(envs, trains=True)
            except ImportError as error:
                reason = f"cannot be loaded: {error}"
            for _ in range(plan.runs):
                samples.append(train(program, plan.run_steps))
                if collect is not None:
                    theirs.append(collect(plan.training_s))
        case = f"{envs} environments stepped one by one, while training"
        yield dataclasses.replace(row(case, "steps/s", "higher", samples, peer, theirs), reason=reason)


def resident_mb(pid: int) -> float:
    """Resident memory, shared pages included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def start(setup: ActorSetup) -> tuple[float, float]:
    """Seconds from the start of an actor process to its first message, and its memory then."""
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), 2)
    weights = setup.policy.weights if setup.policy is not None else np.zeros(1, np.float32)
    begun = time.perf_counter()
    group = ActorGroup([setup], [queue], WeightSyncQueue(len(weights)))
    try:
        if queue.peek(120.0) is None:
            raise RuntimeError("The actor sent nothing within two minutes.")
        return time.perf_counter() - begun, resident_mb(group.pids[0])
    finally:
        group.stop()


def measure_starts(plan: Plan) -> Iterator[Row]:
    """What an actor process takes."""
    native, in_torch = setup_of("sync", 8), setup_of("sync", 8, native=False)
    found = [(start(native), start(in_torch)) for _ in range(plan.starts)]
    for which, case, unit in ((0, "start of an actor process", "s"), (1, "memory of an actor process", "MB")):
        samples, theirs = ([pair[side][which] for pair in found] for side in (0, 1))
        yield row(case, unit, "lower", samples, "ours in torch", theirs)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: few repetitions, nothing written")
    options = parser.parse_args(arguments)
    plan = Plan.quick() if options.quick else Plan()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    for part, affinity in ((measure_steps, cores[-1:]), (measure_starts, cores[-1:]), (measure_training, cores)):
        os.sched_setaffinity(0, affinity)
        for found in part(plan):
            rows.append(found)
            theirs = found.reason if found.theirs is None else f"{found.theirs:,.4g}"
            ratio = "" if found.ratio is None else f"{found.ratio:6.2f} x"
            print(
                f"{found.case:52} {found.ours:12,.4g} {found.unit:8} {found.peer:26} {theirs:>12} {ratio}", flush=True
            )
    if not options.quick:
        write("actors", "make bench-actors", 1, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
