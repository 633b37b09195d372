"""How benchmarks measure: contenders take turns, in a process whose libraries use one thread."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

ONE_THREAD = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "RL_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",
}


class DifferenceError(Exception):
    """Two contenders do not compute the same: comparing their speed would mean nothing."""


def options(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser that has `--quick`; `quick` says what that option measures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; writes nothing")
    return parser


def one_thread(module: str, *, pinned: bool = True) -> None:
    """Restart `module` with one thread in every library, on one core if `pinned`; do nothing in the restarted process.

    Libraries read these variables when they are loaded.
    """
    if all(os.environ.get(name) == value for name, value in ONE_THREAD.items()):
        return
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **ONE_THREAD})


def microseconds(function: Callable[[], object], calls: int) -> float:
    """Microseconds of a call, the mean of `calls`."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / calls / 1e3


def fastest(take: Callable[[], float], seconds: float) -> float:
    """The least value that `take` returns, called for about `seconds`, at least once."""
    found, end = float("inf"), time.perf_counter() + seconds
    while True:
        found = min(found, take())
        if time.perf_counter() >= end:
            return found


def at_once(take: Callable[[], None]) -> None:
    """A turn that is taken once, whatever disturbs it."""
    take()


def alternate(
    contenders: Sequence[Callable[[int], float]],
    counts: Sequence[int],
    repeats: int,
    turn: Callable[[Callable[[], None]], None] = at_once,
) -> np.ndarray:
    """What `contender(count)` returns, `(contenders, repeats)`; they take turns, and take turns at being first.

    `turn` calls what takes a turn of all of them, maybe again.
    """
    values = np.empty((len(contenders), repeats))

    def take(repeat: int) -> None:
        for place in range(len(contenders)):
            which = (place + repeat) % len(contenders)
            values[which, repeat] = contenders[which](counts[which])

    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            turn(partial(take, repeat))
    finally:
        gc.enable()
    return values


def alternate_calls(
    functions: Sequence[Callable[[], object]],
    repeats: int,
    repeat_s: float,
    slices: int = 1,
    turn: Callable[[Callable[[], None]], None] = at_once,
) -> np.ndarray:
    """Microseconds of a call `(functions, repeats)`; each repeat calls a function for about `repeat_s`.

    With `slices`, a repeat is that many as long as this, and its fastest counts. `turn`: see `alternate`.
    """
    counts = []
    for function in functions:
        function()  # allocates, compiles
        once = min(microseconds(function, 1) for _ in range(3))
        counts.append(max(1, min(2_000, round(repeat_s * 1e6 / once))))

    def timed(function: Callable[[], object], calls: int) -> float:
        return min(microseconds(function, calls) for _ in range(slices))

    return alternate([partial(timed, function) for function in functions], counts, repeats, turn)
