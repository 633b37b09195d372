"""Learners with what a host has of a run, on this machine or on a Ray cluster, and kills of these at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from pearl.algorithms import DQN
from pearl.algorithms.trainer import transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.local_sgd.averaging import Average, AveragingSpec
from pearl.local_sgd.group import LearnerGroup, start_here
from pearl.local_sgd.local_learner import LearnerSetup
from pearl.remote.bridge import Needs
from pearl.remote.group import RayBridge, RemoteLearners
from pearl.spec import ReplaySpec

PATIENCE_S = 300.0  # a cluster begins within seconds on a quiet machine, and a worker after a minute on a busy one
GOES_ON_S = 2.0  # the others without a Learner that is lost
ROWS = 32
ROUNDS = int(os.environ.get("PEARL_KILLS", "10"))
SEED = int(os.environ.get("PEARL_KILLS_SEED", "0"))
ROUND_S = 60.0  # of a round, for the time limit of all together


def make_trainer(seed: int, **settings: Any) -> DQN:
    env = gym.make("CartPole-v1")
    return DQN(env.observation_space, env.action_space, seed=seed, **{"hidden_sizes": (16,), **settings})


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "not met in time"
        time.sleep(0.02)


class Run:
    """Two Learners on the cluster at `address`, or in processes of this machine, and what a host has of a run."""

    def __init__(
        self, address: str | None, states: Path, learners: int = 2, make: Any = make_trainer, **options: Any
    ) -> None:
        env = gym.make("CartPole-v1")
        setup = LearnerSetup(
            AveragingSpec(learners, average_every=4),
            make,
            NativeLearner,
            transition_of(DQN, env.observation_space, env.action_space, {}),
            ReplaySpec(1000 * learners),
            batch_size=16 * learners,
            replay_ratio=np.inf,
            learning_starts=ROWS * learners,
        )
        self.rng = np.random.default_rng(0)
        self.trainer = make(seed=0)
        start: Any = start_here
        if address is not None:
            self.bridge = RayBridge(address, Needs(learners=learners))
            start = RemoteLearners(self.bridge)
        self.group = LearnerGroup(setup, self.trainer, message_rows=ROWS, states=states, start=start, **options)
        self.group.launch()
        self.columns = {
            field.name: self.rng.standard_normal((ROWS, *field.shape)).astype(field.dtype)
            for field in setup.transition.fields
        }
        self.columns["action"][...] = self.rng.integers(2, size=self.columns["action"].shape)
        self.sent = 0

    def step(self) -> None:
        """What a host's loop does."""
        self.group.check()
        if self.group.wants_data:
            self.group.insert(self.columns, ROWS, 0.4)
            self.sent += ROWS
        time.sleep(0.005)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not met in time: {self.group.pids}, {self.group.progress}"
            self.step()

    @property
    def version(self) -> int:
        return self.group.server.version

    def newest(self) -> Average:
        found = self.group.server.newest()
        assert found is not None
        return found

    def until_members(self, *members: bool) -> None:
        """Until an average is one of these Learners, and 20 more were made."""
        self.until(lambda: tuple(self.newest().members) == members)
        version = self.version
        self.until(lambda: self.version >= version + 20)

    def longest_gap_s(self, condition: Callable[[], object]) -> float:
        """The longest time between two averages until `condition()`, and the first average after it."""
        longest, version, at, is_met = 0.0, self.version, time.monotonic(), False
        deadline = at + PATIENCE_S
        while not is_met or self.version == version:
            now = time.monotonic()
            assert now < deadline, "not met in time"
            if self.version > version:
                version, at = self.version, now
            longest, is_met = max(longest, now - at), is_met or bool(condition())
            self.step()
        return longest

    def close(self) -> None:
        self.group.kill()
        if hasattr(self, "bridge"):
            self.bridge.close()


@contextlib.contextmanager
def running(address: str | None, states: Path, **options: Any) -> Iterator[Run]:
    made = Run(address, states, **options)
    try:
        made.group.wait_until_ready()
        yield made
    finally:
        made.close()


def kill_rounds(run: Run, rounds: int, seed: int = 0) -> int:
    """Kill one Learner or all at a random moment, again and again; each time the others go on, and all come back.

    Returns how many were killed. Fails if a round takes longer than PATIENCE_S, the others longer than GOES_ON_S.
    """
    rng, killed = random.Random(seed), 0
    for number in range(rounds):
        begin = time.monotonic()
        run.until(lambda: run.newest().members.all())
        pause = time.monotonic() + rng.uniform(0.0, 0.3)
        run.until(lambda pause=pause: time.monotonic() > pause)
        ranks = [0, 1] if rng.random() < 0.2 else [rng.randrange(2)]
        for rank in ranks:
            os.kill(run.group.pids[rank], signal.SIGKILL)
        killed += len(ranks)
        if rng.random() < 0.5:  # while a state is asked for
            run.group.save()
        gap_s = run.longest_gap_s(lambda killed=killed: run.group.restarts == killed)
        assert len(ranks) == 2 or gap_s < GOES_ON_S, f"round {number}"
        print(f"round {number}: killed {ranks}, gap {gap_s:.2f} s, {time.monotonic() - begin:.1f} s", flush=True)
    run.until_members(True, True)
    run.group.stop()
    return killed
