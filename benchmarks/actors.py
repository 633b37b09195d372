"""Environment steps that an actor collects a second beside Stable-Baselines3, and what its process takes to start.

Ours and theirs take turns on one core. `--quick` is a look, which writes nothing; without it,
benchmarks/results/actors.json is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import Row, write
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.environment import make_vector_env
from pearl.actors.exploration import EpsilonGreedy
from pearl.actors.policy_plan import read_policy
from pearl.actors.process import ActorGroup
from pearl.algorithms import DQN
from pearl.algorithms.trainer import make_trainer
from pearl.replay.storage import DataStorage
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.queues import DataCollectionQueue, WeightSyncQueue
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec

ENVIRONMENT = "CartPole-v1"
HIDDEN = (64, 64)
EPSILON = 0.1
SLOTS = 100_000
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

    @classmethod
    def quick(cls) -> Plan:
        """A look."""
        return cls(alternations=3, turn_s=0.2, starts=2)


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


def stable_baselines3(envs: int) -> tuple[str, Collect]:
    """Its DQN's own loop, with gradient steps switched off."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env

    vector = make_vec_env(ENVIRONMENT, n_envs=envs, seed=1)
    model = sb3.DQN(
        "MlpPolicy",
        vector,
        learning_starts=0,
        train_freq=64,
        gradient_steps=0,
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
    os.sched_setaffinity(0, cores[-1:])
    for found in (*measure_steps(plan), *measure_starts(plan)):
        rows.append(found)
        theirs = found.reason if found.theirs is None else f"{found.theirs:,.4g}"
        ratio = "" if found.ratio is None else f"{found.ratio:6.2f} x"
        print(f"{found.case:45} {found.ours:12,.4g} {found.unit:8} {found.peer:26} {theirs:>12} {ratio}", flush=True)
    os.sched_setaffinity(0, cores)
    if not options.quick:
        write("actors", "make bench-actors", 1, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
