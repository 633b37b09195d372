"""Setting 1's iteration as the Host Runtime drives it: sample, assign to the Learner, update the priorities."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from pearl.replay.requests import ReplayRequestQueue
from pearl.runtime.workers import AssignmentQueue, DoneQueue, Storage


class IterationPace(Protocol):
    """Decides when a batch may be sampled and is told of events: a Session, or a profiler."""

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of the next batch."""

    def may_sample(self) -> bool:
        """Whether to request the next batch now."""

    def sampling(self) -> None:
        """A sampling is requested now."""

    def sampled(self, batch: int, indices: np.ndarray) -> None:
        """A batch was sampled and assigned to the Learner under the id `batch`."""

    def trained(self, td_error: float, *, batch: int) -> None:
        """The batch with the id `batch` came back trained; batches may come back in any order."""


class HostIteration:
    """Moves batches between the Replay Manager's queue and the Learner's, from the host's thread alone.

    `storage` is where the host gathers a batch's transitions; None where the Learner gathers them itself.
    """

    def __init__(
        self,
        rrq: ReplayRequestQueue,
        laq: AssignmentQueue,
        ldq: DoneQueue,
        batch_size: int,
        storage: Storage | None = None,
    ) -> None:
        self._rrq, self._laq, self._ldq = rrq, laq, ldq
        self._batch_size, self._storage = batch_size, storage
        self._assigned = 0

    def advance(self, pace: IterationPace) -> None:
        """Move at most one batch at each of the three places; never waits."""
        start = 0.0  # of the first move; a call without one costs no clock
        # A batch is trained: its new priorities go back to the Replay Manager.
        if done := self._ldq.peek():
            start = time.perf_counter()
            result, _ = done
            self._rrq.write_update(result["indices"], result["priorities"], result["generations"])
            pace.trained(float(result["td_error"][0]), batch=int(result["batch"][0]))
            self._ldq.release()
        # Request the next batch.
        if pace.may_sample():
            start = start or time.perf_counter()
            pace.sampling()  # before the request: that wakes a thread which may take this one's core
            self._rrq.write_sample(self._batch_size, pace.beta)
        # A batch is sampled: the Learner gets it.
        if sample := self._rrq.poll():
            start = start or time.perf_counter()
            self._laq.assign(sample, self._storage, batch=self._assigned)
            pace.sampled(self._assigned, sample.indices)
            self._assigned += 1
        if start:
            self._laq.times.record("messages", start, time.perf_counter())
