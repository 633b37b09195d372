"""Times a function: warms it up and repeats it until the median settles."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_T = TypeVar("_T")

WARM_UP = 5
_LEAST_SAMPLES, MOST_SAMPLES = 20, 2000
_SETTLED = 0.03  # relative difference of the medians of both halves of the samples


def measure(work: Callable[[], object], budget_s: float, before: Callable[[], object] | None = None) -> list[float]:
    """Microseconds of `work()`, warmed up, repeated until the median settles or `budget_s` is spent.

    `before` runs before each call and is not timed.
    """
    for _ in range(WARM_UP):
        if before is not None:
            before()
        work()
    samples: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(samples) < MOST_SAMPLES:
        if before is not None:
            before()
        start = time.perf_counter_ns()
        work()
        samples.append((time.perf_counter_ns() - start) / 1e3)
        if len(samples) >= _LEAST_SAMPLES and (time.perf_counter() > deadline or _settled(samples)):
            break
    return samples


def _settled(samples: list[float]) -> bool:
    if len(samples) < 200 or len(samples) % 100:
        return False
    half = len(samples) // 2
    first, second = float(np.median(samples[:half])), float(np.median(samples[half:]))
    return abs(first - second) <= _SETTLED * max(first, second)


def on_own_thread(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run `work` in a separate thread, so that torch's thread count, which it sets, holds in this thread only."""

    @functools.wraps(work)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with ThreadPoolExecutor(1, thread_name_prefix="profiler") as thread:
            return thread.submit(work, *args, **kwargs).result()

    return run
