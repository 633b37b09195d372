"""Times setting 1's queues and threads, with primitives that do no work."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from composer.platform import usable
from composer.profiling.context import ProfilingContext
from pearl.backends import backend_of
from pearl.errors import PearlError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.protocol import Learner, StepResult
from pearl.replay import ReplayRequestQueue, Sample
from pearl.runtime.host_iteration import HostIteration
from pearl.runtime.workers import AssignmentQueue, DoneQueue, LearnerWorker
from pearl.spec import FieldSpec, ReplayMode, TransitionSpec

_WARM_UP = 50  # iterations
_ITERATIONS = 200  # of each sample, which is their mean
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


def messages_us(context: ProfilingContext) -> float:
    """Microseconds of the host's messages per iteration of setting 1; 0 where only the host is usable."""
    host, train = context.platform.host, context.problem.train
    if not any(backend_of(device).needs_messages for device in usable(context.platform)[0] if device != host):
        return 0.0
    if (stated := backend_of(host).messages_us(host)) is not None:
        return stated
    context.begin("messages through the host")
    delay, mode = train.priority_update_delay, context.problem.replay.mode
    key = context.key("messages", host, {"priority_update_delay": delay, "mode": mode})
    work = functools.partial(measure_messages, train.batch_size, delay, mode)
    return context.known(key, ("iteration",), lambda: {"iteration": work()}, host)["iteration"].value_us


def measure_messages(batch_size: int, delay: int, mode: ReplayMode = "prioritized") -> list[float]:
    """Microseconds of an iteration's messages, up to `delay` updates ahead; a sample is a mean over 200 iterations."""
    bell, learner = Bell(), _NoLearner(batch_size)
    nothing = TransitionSpec((FieldSpec("nothing", (), "float32"),))
    laq, ldq = AssignmentQueue(batch_size, nothing, delay + 1), DoneQueue(batch_size, delay + 1, bell)
    wsq = WeightSyncQueue(learner.weight_count)
    worker = LearnerWorker(laq, ldq, wsq, bell, target=learner, weight_sync_interval=_ITERATIONS)
    replay: Any = _NoReplay(batch_size, mode)
    samples = []
    with ReplayRequestQueue(replay, max_batch=batch_size) as rrq:
        rrq.attach_bell(bell.native)
        worker.launch()
        try:
            for count in (_WARM_UP, *[_ITERATIONS] * _REPEATS):
                iteration = HostIteration(rrq, laq, ldq, batch_size, _NoStorage())
                samples.append(_run_host(iteration, _Pace(count, delay), rrq, worker, bell))
        finally:
            worker.stop()
    return samples[1:]


class _Pace:
    """Allows `iterations` at full speed, up to `delay` updates ahead."""

    beta = 0.4

    def __init__(self, iterations: int, delay: int) -> None:
        self.iterations, self._delay = iterations, delay
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
