"""What the messages of setting 1 cost: the queues and threads of a run, around primitives that have no work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from pearl.errors import PearlError
from pearl.learner.protocol import StepResult
from pearl.replay import ReplayRequestQueue, Sample
from pearl.runtime.queues import Bell, WeightSyncQueue
from pearl.runtime.workers import AssignmentQueue, DoneQueue, LearnerWorker
from pearl.spec import FieldSpec, ReplayMode, TransitionSpec

_ITERATIONS, _REPEATS = 200, 12  # of a sample, which is a mean; the first warms up
_LONGEST_WAIT_S = 10.0


class _NoReplay:
    """A Replay Manager that has the same batch at hand for everybody."""

    mode: ReplayMode = "prioritized"

    def __init__(self, batch_size: int) -> None:
        self.capacity = batch_size
        ones = np.ones(batch_size)
        self._sample = Sample(np.arange(batch_size), ones.astype(np.float32), ones.astype(np.uint32))

    def sample(self, _batch_size: int, _beta: float) -> Sample:
        return self._sample

    def update(self, indices: np.ndarray, _priorities: np.ndarray, _generations: np.ndarray) -> int:
        return len(indices)


class _NoStorage:
    def gather(self, _indices: np.ndarray, out: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
        return out or {}


class _NoLearner:
    weight_count = 1
    backend = device = "none"

    def __init__(self, batch_size: int) -> None:
        self._result = StepResult(np.ones(batch_size, np.float32), {"td_error": 1.0})

    def prepare(self) -> None:
        pass

    def step(self, _batch: Mapping[str, Any], _weights: np.ndarray) -> StepResult:
        return self._result

    def write_weights(self, out: np.ndarray) -> None:
        out[:] = 0


def measure_messages(batch_size: int, delay: int) -> list[float]:
    """Microseconds of the messages of an iteration, up to `delay` updates ahead, a mean of 200 for each sample."""
    bell = Bell()
    nothing = TransitionSpec((FieldSpec("nothing", (), "float32"),))
    laq, ldq = AssignmentQueue(batch_size, nothing, delay + 1), DoneQueue(batch_size, delay + 1, bell)
    wsq = WeightSyncQueue(1)
    replay: Any = _NoReplay(batch_size)
    worker = LearnerWorker(laq, ldq, wsq, bell, target=_NoLearner(batch_size), weight_sync_interval=_ITERATIONS)
    with ReplayRequestQueue(replay, max_batch=batch_size) as rrq:
        rrq.attach_bell(bell.native)
        worker.launch()
        try:
            samples = [_run_host(rrq, laq, ldq, bell, batch_size, delay) for _ in range(_REPEATS)]
        finally:
            worker.stop()
    return samples[1:]


def _run_host(
    rrq: ReplayRequestQueue, laq: AssignmentQueue, ldq: DoneQueue, bell: Bell, batch_size: int, delay: int
) -> float:
    """The Host Runtime's loop of setting 1 (runtime_templates/setting1.py.j2), without Actors."""
    storage = _NoStorage()
    requested = assigned = done = 0
    start = heard = time.perf_counter()
    while done < _ITERATIONS:
        seen, before = bell.value(), (requested, assigned, done)
        if message := ldq.peek():
            result, _ = message
            rrq.write_update(result["indices"], result["priorities"], result["generations"])
            ldq.release()
            done += 1
        if requested - done <= delay and requested == assigned and requested < _ITERATIONS:
            rrq.write_sample(batch_size)
            requested += 1
        if sample := rrq.poll():
            laq.assign(sample, storage)
            assigned += 1
        if (requested, assigned, done) != before:
            heard = time.perf_counter()
        elif time.perf_counter() - heard > _LONGEST_WAIT_S:
            raise PearlError(
                f"The queues of setting 1 stood still for {_LONGEST_WAIT_S:.0f} s while they were measured."
            )
        else:
            bell.wait(seen, 0.05)
    rrq.drain()
    return (time.perf_counter() - start) * 1e6 / _ITERATIONS
