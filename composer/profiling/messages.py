"""Times setting 1's queues and threads, with primitives that do no work or with real ones."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pearl.errors import PearlError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.protocol import Learner, StepResult
from pearl.replay import ReplayManager, ReplayRequestQueue, Sample
from pearl.runtime.host_iteration import HostIteration
from pearl.runtime.workers import AssignmentQueue, DoneQueue, LearnerWorker
from pearl.spec import FieldSpec, ReplayMode, TransitionSpec

_WARM_UP = 50  # iterations
ITERATIONS = 200  # of each sample, which is their mean
_REPEATS = 9  # samples
_LONGEST_WAIT_S = 10.0


class _NoReplay:
    """A Replay Manager that always returns the same batch."""

    def __init__(self, batch_size: int, mode: ReplayMode) -> None:
        self.capacity, self.mode = batch_size, mode
        ones = np.ones(batch_size)
        self._sample = Sample(np.arange(batch_size), ones.astype(np.float32), ones.astype(np.uint32))

    def sample(self, _batch_size: int, _beta: float) -> Sample:
        return self._sample

    def update(self, indices: np.ndarray, _priorities: np.ndarray, _generations: np.ndarray) -> int:
        return len(indices)


class _NoStorage:
    def gather(self, _indices: np.ndarray, out: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
        return out or {}


class _NoLearner(Learner):
    weight_count = 1
    backend = device = "none"

    def __init__(self, batch_size: int) -> None:
        self._result = StepResult(np.ones(batch_size, np.float32), 1.0, {})

    def prepare(self) -> None:
        pass

    def step(self, _batch: Mapping[str, Any], _weights: np.ndarray) -> StepResult:
        return self._result

    def write_weights(self, out: np.ndarray) -> None:
        out[:] = 0

    def load_weights(self, weights: np.ndarray) -> None:
        pass


def measure_messages(batch_size: int, delay: int, mode: ReplayMode = "prioritized") -> list[float]:
    """Microseconds of an iteration's messages, up to `delay` updates ahead; a sample is a mean over 200 iterations."""
    nothing = TransitionSpec((FieldSpec("nothing", (), "float32"),))
    replay: Any = _NoReplay(batch_size, mode)
    return measure_pipeline(replay, _NoStorage(), _NoLearner(batch_size), nothing, batch_size, delay)


def measure_pipeline(
    replay: ReplayManager,
    storage: Any,
    learner: Learner,
    transition: TransitionSpec,
    batch_size: int,
    delay: int,
    busy: int = 0,
    *,
    learner_gathers: bool = False,
    beta: float = 0.4,
    weight_sync_interval: int = ITERATIONS,
    iterations: int = ITERATIONS,
    renew: Callable[[int], None] | None = None,
) -> list[float]:
    """Microseconds of an iteration of setting 1 while `busy` processes use the cores as Actors would.

    With `learner_gathers` the Learner gathers its batches from `storage`, which is on its device; else the host does.
    A sample is the mean over `iterations`. Before each sample `renew` gets the number of items that it will draw.
    """
    bell = Bell()
    laq = AssignmentQueue(batch_size, None if learner_gathers else transition, delay + 1)
    ldq = DoneQueue(batch_size, delay + 1, bell)
    wsq = WeightSyncQueue(learner.weight_count)
    worker = LearnerWorker(
        laq,
        ldq,
        wsq,
        bell,
        target=learner,
        weight_sync_interval=weight_sync_interval,
        storage=storage if learner_gathers else None,
    )
    of_host = None if learner_gathers else storage
    samples = []
    with ReplayRequestQueue(replay, max_batch=batch_size) as rrq, busy_processes(busy):
        rrq.attach_bell(bell.native)
        worker.launch()
        try:
            for count in (min(_WARM_UP, iterations), *[iterations] * _REPEATS):
                if renew is not None:
                    renew(count * batch_size)
                pace = _Pace(count, delay, beta)
                samples.append(_run_host(HostIteration(rrq, laq, ldq, batch_size, of_host), pace, rrq, worker, bell))
        finally:
            worker.stop()
    return samples[1:]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that keep one core busy each, and end with this process."""
    work = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", work]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class _Pace:
    """Allows `iterations` at full speed, up to `delay` updates ahead."""

    def __init__(self, iterations: int, delay: int, beta: float) -> None:
        self.iterations, self.beta, self._delay = iterations, beta, delay
        self.requested = self.assigned = self.done = 0

    def may_sample(self) -> bool:
        under_way = self.requested - self.done
        return under_way <= self._delay and self.requested == self.assigned and self.requested < self.iterations

    def sampling(self) -> None:
        self.requested += 1

    def sampled(self, batch: int, indices: np.ndarray) -> None:
        self.assigned += 1

    def trained(self, td_error: float, *, batch: int) -> None:
        self.done += 1


def _run_host(
    iteration: HostIteration, pace: _Pace, rrq: ReplayRequestQueue, worker: LearnerWorker, bell: Bell
) -> float:
    """Microseconds of an iteration of the Host Runtime without Actors."""
    start = heard = time.perf_counter()
    while pace.done < pace.iterations:
        seen, before = bell.value(), (pace.requested, pace.assigned, pace.done)
        iteration.advance(pace)
        if (pace.requested, pace.assigned, pace.done) != before:
            heard = time.perf_counter()
        elif time.perf_counter() - heard > _LONGEST_WAIT_S:
            raise PearlError(f"Setting 1's queues made no progress for {_LONGEST_WAIT_S:.0f} s during a measurement.")
        else:
            worker.check()
            bell.wait(seen, 0.05)
    rrq.drain()
    return (time.perf_counter() - start) * 1e6 / pace.iterations
