"""Times a function: warms it up and repeats it until the median settles."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_T = TypeVar("_T")

WARM_UP = 5
_LEAST_SAMPLES, MOST_SAMPLES = 20, 2000
_QUICK_S, _QUICK_SAMPLES = 0.2, 10  # the least within a budget below so many seconds
_ENOUGH_SAMPLES = 200
# Fewer samples are enough where they took so many seconds, or this part of the budget if that is less.
_ENOUGH_S, _ENOUGH = 0.1, 0.2
_FEWEST_SAMPLES = 3  # of those that take so long that more would take too long
_TOO_LONG_S, _TOO_LONG = 1.0, 3.0  # seconds, and times the budget
_SETTLED = 0.03  # relative difference of the medians of both halves of the samples


def measure(
    work: Callable[[], object],
    budget_s: float,
    before: Callable[[], object] | None = None,
    *,
    worth_us: float = math.inf,
) -> list[float]:
    """Microseconds of `work()`, warmed up, repeated until the median settles or `budget_s` is spent.

    `before` runs before each call and is not timed. Where all calls of the warm-up took longer than `worth_us`, they
    are the samples, without the first: the result would decide nothing.
    """
    warm_up = [_timed(work, before) for _ in range(WARM_UP)][1:]
    if min(warm_up) > worth_us:
        return warm_up
    samples: list[float] = []
    few = _LEAST_SAMPLES if budget_s >= _QUICK_S else _QUICK_SAMPLES
    enough_s = min(_ENOUGH_S, _ENOUGH * budget_s)
    start = time.perf_counter()
    while len(samples) < MOST_SAMPLES:
        samples.append(_timed(work, before))
        spent_s = time.perf_counter() - start
        least = few if spent_s < max(_TOO_LONG_S, _TOO_LONG * budget_s) else _FEWEST_SAMPLES
        if len(samples) >= least and (spent_s > budget_s or _settled(samples, few if spent_s > enough_s else None)):
            break
    return samples


def _timed(work: Callable[[], object], before: Callable[[], object] | None) -> float:
    if before is not None:
        before()
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def _settled(samples: list[float], few: int | None) -> bool:
    """Whether both halves agree, asked after every `few` samples where these took long."""
    count = len(samples)
    if count % (few or _ENOUGH_SAMPLES // 2) or (few is None and count < _ENOUGH_SAMPLES):
        return False
    half = count // 2
    first, second = float(np.median(samples[:half])), float(np.median(samples[half:]))
    return abs(first - second) <= _SETTLED * max(first, second)


def on_own_thread(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run `work` in a separate thread, so that torch's thread count, which it sets, holds in this thread only."""

    @functools.wraps(work)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with ThreadPoolExecutor(1, thread_name_prefix="profiler") as thread:
            return thread.submit(work, *args, **kwargs).result()

    return run
