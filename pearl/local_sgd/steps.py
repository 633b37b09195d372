"""Gradient steps of one Learner on its bank: in C++ where bank, storage and Learner are native, else one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.protocol import Learner
from pearl.recorder import Recorder
from pearl.replay.banked import BankBatch, sample_bank, weight_factors
from pearl.replay.protocol import ReplayManager
from pearl.replay.storage import DataStorage
from pearl.runtime.workers import GrantQueue, ProgressQueue

logger = logging.getLogger("pearl.local_sgd")

_NEVER = 1 << 62  # steps between two publications of weights: averages are published instead


class Steps(Protocol):
    """Makes gradient steps. The weights of each batch are those of all banks together."""

    def run(self, count: int, beta: float) -> float:
        """Make `count` steps; the mean absolute TD error of their batches."""

    def set_banks(self, others: Sequence[BankBatch]) -> None:
        """Take the facts about the other Learners' banks that came with the average just loaded."""

    def refresh(self) -> None:
        """Read settings and optimizers again, which were changed."""

    def take_least(self) -> float:
        """The smallest `BankBatch.least` of a batch since the last call; infinity without a batch."""

    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far on `sample`, `gather`, `train` and `update`."""


def make_steps(learner: Learner, bank: ReplayManager, storage: DataStorage, batch_size: int) -> Steps:
    """The steps of `learner` on batches of `batch_size` from `bank`: in C++ if there is a loop that knows of banks."""
    laq, ldq, wsq = GrantQueue(1), ProgressQueue(1, Bell()), WeightSyncQueue(learner.weight_count)
    queues = (laq.native, ldq.native, wsq.native)
    loop: Any = learner.fused_loop(bank, storage, batch_size, queues, _NEVER)
    if loop is not None and hasattr(loop, "set_banks"):
        return _FusedSteps(loop, learner, laq, ldq, wsq)
    logger.debug("Gradient steps are driven from Python: this Learner has no loop of its own for banks.")
    return _SingleSteps(learner, bank, storage, batch_size)


class _FusedSteps:
    """The training loop of setting 2, which is granted some steps at a time."""

    def __init__(self, loop: Any, learner: Learner, laq: GrantQueue, ldq: ProgressQueue, wsq: WeightSyncQueue) -> None:
        self._loop, self._learner, self._laq, self._ldq, self._wsq = loop, learner, laq, ldq, wsq

    def run(self, count: int, beta: float) -> float:
        self._laq.grant(count, beta)
        self._loop.run_once(0.0)
        found = self._ldq.peek()
        assert found is not None
        td_error = float(found[0]["td_error"][0])
        self._ldq.release()
        return td_error

    def set_banks(self, others: Sequence[BankBatch]) -> None:
        self._loop.set_banks(np.array([(o.mass, o.least) for o in others], np.float64).reshape(-1, 2))

    def refresh(self) -> None:
        self._learner.refresh()

    def take_least(self) -> float:
        return float(self._loop.take_least())

    def seconds(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self._loop.seconds()
        return found


class _SingleSteps:
    """Any Learner and bank."""

    def __init__(self, learner: Learner, bank: ReplayManager, storage: DataStorage, batch_size: int) -> None:
        self._learner, self._bank, self._storage, self._batch_size = learner, bank, storage, batch_size
        self._others: list[BankBatch] = []
        self._least = math.inf
        self._times = Recorder("sample", "gather", "train", "update")

    def run(self, count: int, beta: float) -> float:
        return sum(self._step(beta) for _ in range(count)) / count

    def _step(self, beta: float) -> float:
        times = self._times
        times.begin()
        drawn, batch = sample_bank(self._bank, self._batch_size, beta)
        self._least = min(self._least, batch.least)
        factor = weight_factors([batch, *self._others], beta)[0]
        weights = (drawn.weights * factor).astype(np.float32)
        times.end("sample")
        columns = self._storage.gather(drawn.indices)
        times.end("gather")
        result = self._learner.step(columns, weights)
        times.end("train")
        self._bank.update(drawn.indices, result.priorities, drawn.generations)
        times.end("update")
        return result.td_error

    def set_banks(self, others: Sequence[BankBatch]) -> None:
        self._others = list(others)

    def refresh(self) -> None:
        pass  # each step reads them

    def take_least(self) -> float:
        least, self._least = self._least, math.inf
        return least

    def seconds(self) -> Mapping[str, float]:
        return self._times.spent
