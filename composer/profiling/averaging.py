"""Times averages over shared memory between threads that do nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from pearl import _native
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.parameters import ParameterLayout
from pearl.local_sgd.shared_memory import AveragingServer, SharedMemoryAverager

_WARM_UP = 3  # averages
_LONGEST = 200  # averages
_PATIENCE_S = 30.0  # of a Learner's thread for another


def measure_average(learners: int, count: int, budget_s: float) -> list[float]:
    """Microseconds of single averages of `count` float32 each, as the first Learner sees them."""
    layout = ParameterLayout((("parameters", (count,)),))
    spec = AveragingSpec(learners, 1, timeout_s=_PATIENCE_S)
    server = AveragingServer(spec, layout, np.zeros(count, np.float32))
    samples: list[float] = []
    started = threading.Barrier(learners)

    def take_part(rank: int) -> None:
        averager = SharedMemoryAverager(server.link(rank), layout)
        own, facts = np.full(count, float(rank), np.float32), np.zeros(1)
        arrays = _native.ParameterArrays([own], [False])
        averager.join()
        started.wait(_PATIENCE_S)
        until = time.perf_counter() + budget_s
        for number in range(_LONGEST):
            start = time.perf_counter()
            arrays.gather(averager.staging)
            averager.hand_in(averager.staging, facts)
            arrays.scatter(averager.take().parameters)
            end = time.perf_counter()
            if rank == 0:
                samples.append((end - start) * 1e6)
            if number >= _WARM_UP + 2 and end > until:
                break
        averager.leave()

    run_threads(server, take_part, learners)
    return samples[_WARM_UP:]


def run_threads(server: AveragingServer, work: Callable[[int], None], learners: int) -> None:
    """Call `work(rank)` in a thread for each Learner while the server averages, and wait for all."""
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(learners)]
    server.launch()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.close()
