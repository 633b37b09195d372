"""The work that several benchmarks share: trainers of a given size, random transitions, and setting 2's loop in C++."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from pearl import algorithms
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.runtime.workers import GrantQueue, ProgressQueue, TrainingLoop
from pearl.spec import TransitionSpec

FILLED_AT_ONCE = 10_000


@dataclass(frozen=True)
class Case:
    """One algorithm, network and batch size. An observation has `floats` numbers."""

    algorithm: str
    hidden: tuple[int, ...]
    batch: int

    floats = 4
    actions = 2  # discrete actions, or numbers of a continuous one

    @property
    def shape(self) -> str:
        """The sizes, as tables show them."""
        return f"{'x'.join(map(str, self.hidden))} B={self.batch}"

    @property
    def name(self) -> str:
        """Algorithm and sizes, as tables show them."""
        return f"{self.algorithm} {self.shape}"

    def trainer(self, **settings: object) -> Any:
        """A trainer with the same weights each time; observations and continuous actions lie in [-1, 1]."""
        obs, box = (spaces.Box(-1.0, 1.0, (size,), np.float32) for size in (self.floats, self.actions))
        space = spaces.Discrete(self.actions) if self.algorithm == "DQN" else box
        return getattr(algorithms, self.algorithm)(obs, space, hidden_sizes=self.hidden, seed=0, **settings)


def transitions(spec: TransitionSpec, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random rows `(count, *shape)`."""
    rows = spec.empty(count)
    for name, column in rows.items():
        if name == "discount":
            column[:] = 0.99 * (rng.random(count) > 0.05)
        elif column.dtype.kind == "f":
            rng.standard_normal(column.shape, np.float32, out=column)
        else:
            column[:] = rng.integers(0, 2 if name == "action" else 256, column.shape, column.dtype)
    return rows


@dataclass(frozen=True)
class Filled:
    """A Replay Manager and a Data Storage whose every slot is written."""

    manager: Any
    storage: Any
    spec: TransitionSpec

    @classmethod
    def of(cls, trainer: Any, slots: int, make: Callable[[TransitionSpec, int], tuple[Any, Any]]) -> Filled:
        """Random transitions of random priorities in the replay that `make(spec, slots)` returns."""
        spec = TransitionSpec.from_spaces(trainer.observation_space, trainer.action_space)
        made = cls(*make(spec, slots), spec)
        rng = np.random.default_rng(0)
        rows = transitions(spec, min(slots, FILLED_AT_ONCE), rng)
        for start in range(0, slots, FILLED_AT_ONCE):
            count = min(FILLED_AT_ONCE, slots - start)
            made.manager.insert(made.storage.insert(rows, count), rng.random(count, np.float32) + 0.01)
        return made


class Loop:
    """Setting 2's loop in C++, of a learner over a replay."""

    def __init__(self, learner: Any, filled: Filled, batch: int, weight_sync_interval: int) -> None:
        self.learner, bell = learner, Bell()
        self._laq, self._ldq = GrantQueue(1), ProgressQueue(1, bell)
        self._loop = TrainingLoop(
            self._laq,
            self._ldq,
            WeightSyncQueue(learner.weight_count),
            bell,
            replay=filled.manager,
            storage=filled.storage,
            learner=learner,
            batch_size=batch,
            transition=filled.spec,
            weight_sync_interval=weight_sync_interval,
        )
        assert type(self._loop.kernel).__name__ == "TrainingLoop", "a loop in C++ was expected"

    def run(self, iterations: int) -> float:
        """Microseconds of an iteration: the wall-clock mean over `iterations`."""
        self._laq.grant(iterations, 0.4)
        start = time.perf_counter()
        self._loop.run_once()
        taken = time.perf_counter() - start
        self._ldq.peek()
        self._ldq.release()
        return taken / iterations * 1e6

    def run_by_its_clocks(self, iterations: int) -> float:
        """Microseconds of an iteration: the sum of the parts that the loop times itself."""
        before = sum(self.seconds().values())
        self.run(iterations)
        return (sum(self.seconds().values()) - before) / iterations * 1e6

    def seconds(self) -> dict[str, float]:
        """The time that the loop's thread spent on each part so far."""
        found: dict[str, float] = self._loop.kernel.seconds()
        return found
