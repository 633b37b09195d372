"""Environment steps per second of an actor and of Stable-Baselines3, and the time to start an actor process.

CartPole-v1 by a DQN of two hidden layers of 64, with random actions at a rate of 0.1. Ours is an actor with the whole
path of its transitions in a run: the DCQ, the host's buffer, the Data Storage. Stable-Baselines3's is the loop of its
DQN with gradient steps switched off, including its replay buffer. One thread each, on one core, taking turns.

"One by one" is `vectorization="sync"`, the composer's default. "As one vector" is the environment's own vector
class, which Stable-Baselines3 does not accept. "Ours in torch" is the same actor with its policy in torch. "While
training": the composed program on all cores with one actor and half a gradient step (batch 64) per environment step;
Stable-Baselines3's `learn()` with as many gradient steps, on the same cores. The time to start counts from the spawning
of the process to its first message (8 environments).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.programs import composer_of, run_program
from benchmarks.record import Row, shown, write
from benchmarks.timing import options
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
    training_s: float = 5.0  # seconds of a run of theirs


PLAIN = {"hidden_sizes": HIDDEN, "double": False, "n_step": 1, "learning_rate_schedule": "constant"}  # as the peer
QUICK = Plan(alternations=3, turn_s=0.2, starts=2, runs=1, run_steps=20_000, training_s=2.0)


def setup_of(vectorization: Any, envs: int, *, native: bool = True) -> ActorSetup:
    """An actor's setup, with its policy in C++ or in torch."""
    spec = ActorSpec(ENVIRONMENT, envs_per_actor=envs, vectorization=vectorization)
    settings = {"hidden_sizes": HIDDEN, "n_step": 1, "exploration": EpsilonGreedy(EPSILON, EPSILON, 1)}
    setup = ActorSetup(DQN, settings, spec, TrainSpec(), seed=1)
    if not native:
        return setup
    known = make_vector_env(spec, 1)
    trainer = make_trainer(DQN, known.single_observation_space, known.single_action_space, seed=1, settings=settings)
    return dataclasses.replace(setup, policy=read_policy(trainer))


def transition_of(setup: ActorSetup) -> TransitionSpec:
    """The columns of the environment's transitions."""
    known = make_vector_env(setup.spec, 1)
    return TransitionSpec.from_spaces(known.single_observation_space, known.single_action_space)


def ours(setup: ActorSetup) -> Collect:
    """Collection through the whole path of a run: the DCQ, the host's buffer, the Data Storage."""
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


def stable_baselines3(envs: int, *, trains: bool = False) -> tuple[str, Collect | None, str]:
    """Name, loop and reason if it cannot be loaded. The loop is its DQN's own; without `trains`, no gradient steps."""
    try:
        import stable_baselines3 as sb3
        from stable_baselines3.common.env_util import make_vec_env
    except ImportError as error:
        return "stable-baselines3", None, f"cannot be loaded: {error}"

    vector = make_vec_env(ENVIRONMENT, n_envs=envs, seed=1)
    # Steps of the vector between trainings.
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

    return f"stable-baselines3 {sb3.__version__}", collect, ""


def measure_steps(plan: Plan) -> Iterator[Row]:
    """Environment steps per second on one core."""
    for envs in plan.envs:
        sides: dict[str, Collect] = {name: ours(setup_of(name, envs)) for name in VECTORS}
        sides |= {f"{name} in torch": ours(setup_of(name, envs, native=False)) for name in VECTORS}
        peer, their_collect, reason = stable_baselines3(envs)
        if their_collect is not None:
            sides["theirs"] = their_collect
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(plan.alternations + 1):
            for name, collect in sides.items():
                found = collect(plan.turn_s)
                if turn:  # the first turn warms up
                    samples[name].append(found)
        for name, text in VECTORS.items():
            case = f"{envs} environments {text}"
            yield Row.of(case, "steps/s", "higher", samples[name], peer, samples.get("theirs"), reason)
            yield Row.of(case, "steps/s", "higher", samples[name], "ours in torch", samples[f"{name} in torch"])


def train(program: Path, steps: int) -> float:
    """Environment steps per second of a composed program from its start to its end, without its imports."""
    run_program(program, "--timesteps", steps, "--eval-episodes", 0, "--until-return", "none", "--run-dir", "run")
    found = json.loads((program.parent / "run" / "summary.json").read_text(encoding="utf-8"))
    return float(found["env_steps"] / found["wall_s"])


def measure_training(plan: Plan) -> Iterator[Row]:
    """Environment steps per second with half as many gradient steps, on all cores."""
    training = {"batch_size": BATCH, "replay_ratio": GRADIENT_STEPS * BATCH}
    for envs in plan.envs:
        samples, theirs = list[float](), list[float]()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            composer = composer_of(folder, DQN, ENVIRONMENT, envs, SLOTS, training, **PLAIN)
            composer.run()
            program = composer.runtime_gen(path=folder / "program.py", timesteps=plan.run_steps)
            peer, collect, reason = stable_baselines3(envs, trains=True)
            for _ in range(plan.runs):
                samples.append(train(program, plan.run_steps))
                if collect is not None:
                    theirs.append(collect(plan.training_s))
        case = f"{envs} environments stepped one by one, while training"
        yield Row.of(case, "steps/s", "higher", samples, peer, theirs, reason)


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
    """Time and memory that an actor process takes to start."""
    native, in_torch = setup_of("sync", 8), setup_of("sync", 8, native=False)
    found = [(start(native), start(in_torch)) for _ in range(plan.starts)]
    for which, case, unit in ((0, "start of an actor process", "s"), (1, "memory of an actor process", "MB")):
        samples, theirs = ([pair[side][which] for pair in found] for side in (0, 1))
        yield Row.of(case, unit, "lower", samples, "ours in torch", theirs)


def main() -> None:
    arguments = options(__doc__, "few repetitions").parse_args()
    plan = QUICK if arguments.quick else Plan()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    for part, affinity in ((measure_steps, cores[-1:]), (measure_starts, cores[-1:]), (measure_training, cores)):
        os.sched_setaffinity(0, affinity)
        rows += shown(part(plan))
    if not arguments.quick:
        write("actors", "make bench-actors", 1, rows)


if __name__ == "__main__":
    main()
