"""The gain of drawing the next batch on another thread while the Learner runs its backward pass.

That thread updates priorities, samples and gathers. Rows are iterations of setting 2's loop in C++ with one Learner
thread and a filled replay of 1,000,000 transitions (100,000 of 4,096 floats); "floats" is the size of an observation.
Ours is the loop with prefetching. Peers are the same loop "without" it, and the loop with "2 Learner threads", another
use of a second core. All take turns in one process. "A busy Actor": another process steps CartPole-v1 without pause on
the same cores. Before the measurement, a check confirms that both loops train the same weights bit for bit.

The runs show the parts of an iteration without prefetching (all but training can be hidden), how many cores other
processes used while one was meant to be idle, and the Actor's steps per second during each loop.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks import timing, workload
from benchmarks.record import Row, shown, write
from benchmarks.timing import DifferenceError, one_thread, options
from benchmarks.workload import FILLED_AT_ONCE, Filled, Loop
from pearl import _native
from pearl.algorithms.trainer import policy_tensors
from pearl.backends.cpu.learner import NativeLearner
from pearl.replay import DataStorage, make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

# Floats of an observation, and actions: those of CartPole, HalfCheetah and Humanoid, and of a long vector.
OBSERVATIONS = {4: 2, 17: 6, 376: 17, 4096: 6}
SHAPES = (((64, 64), 32), ((256, 256), 256))
SLOTS, SLOTS_OF_LONG_ROWS = 1_000_000, 100_000  # the long rows' columns take 3.3 GB
PUBLICATION_INTERVAL = 100
CHECKED_ITERATIONS = 20

PLAIN, PREFETCH, TWO_THREADS = "plain", "prefetch", "two threads"
LEARNERS: dict[str, dict[str, int | bool]] = {PLAIN: {}, PREFETCH: {"prefetch": True}, TWO_THREADS: {"threads": 2}}


@dataclass(frozen=True)
class Case(workload.Case):
    """A case with its size of observations."""

    floats: int

    @property
    def actions(self) -> int:
        """Discrete actions, or numbers of a continuous one."""
        return OBSERVATIONS[self.floats]

    @property
    def name(self) -> str:
        """Algorithm and sizes, as tables show them."""
        return f"{super().name}, {self.floats} floats"

    @property
    def slots(self) -> int:
        """Slots of the replay."""
        return SLOTS if self.floats < 1000 else SLOTS_OF_LONG_ROWS

    def filled(self, slots: int) -> Filled:
        """A filled replay of `slots` slots."""
        return Filled.of(self.trainer(), slots, make)

    def loop(self, filled: Filled, arguments: Mapping[str, int | bool]) -> Loop:
        """Setting 2's loop over a replay, with a Learner of its own."""
        learner = NativeLearner(self.trainer(), **arguments)  # type: ignore[arg-type]
        return Loop(learner, filled, self.batch, PUBLICATION_INTERVAL)


def make(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
    """An empty replay."""
    return make_replay_manager(ReplaySpec(slots), seed=0), DataStorage(spec, slots)


def check(case: Case) -> None:
    """With and without prefetching, the weights after some iterations have the same bits."""
    weights = []
    for kind in (PLAIN, PREFETCH):
        loop = case.loop(case.filled(FILLED_AT_ONCE), LEARNERS[kind])
        loop.run(CHECKED_ITERATIONS)
        weights.append(torch.cat([t.detach().reshape(-1) for t in policy_tensors(loop.learner.trainer)]))
    if not torch.equal(*weights):
        raise DifferenceError(f"{case.name}: training with prefetching gives other weights.")


def alternate(loops: Sequence[Loop], repeats: int, repeat_s: float) -> np.ndarray:
    """Microseconds of an iteration `(loops, repeats)`, measured in turn."""
    counts = [max(2, round(repeat_s * 1e6 / loop.run(max(2, round(repeat_s * 1e6 / loop.run(5)))))) for loop in loops]
    return timing.alternate([loop.run for loop in loops], counts, repeats)


def step_forever(steps: Synchronized[int]) -> None:
    """An Actor that never waits."""
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    for action in itertools.cycle((0, 1)):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        steps.value += 1


class Actor:
    """A process that steps an environment while it is allowed to, and counts its steps."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._steps = context.Value("q", 0, lock=False)
        self._process = context.Process(target=step_forever, args=(self._steps,), daemon=True)
        self._process.start()
        while self._steps.value < 1000:
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Kill the process: a stopped one does not handle SIGTERM."""
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let it work inside the context."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def pace(self, loop: Loop, seconds: float) -> float:
        """Its steps per second while the loop runs."""
        iterations = max(2, round(seconds * 1e6 / loop.run(5)))
        start, before = time.perf_counter(), self._steps.value
        loop.run(iterations)
        return float(self._steps.value - before) / (time.perf_counter() - start)


class Others:
    """How many cores other processes use, counted from the creation of this object."""

    def __init__(self) -> None:
        self._busy_s, self._start = self._of_others(), time.perf_counter()

    @staticmethod
    def _of_others() -> float:
        """CPU seconds of all processes but this one; NaN where /proc/stat does not exist."""
        try:
            user, nice, system = (int(v) for v in Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
        except OSError:
            return math.nan
        return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()

    def cores(self) -> float:
        """How many cores they kept busy."""
        return (self._of_others() - self._busy_s) / (time.perf_counter() - self._start)


def measure(
    case: Case, filled: Filled, actor: Actor, repeats: int, repeat_s: float
) -> tuple[list[Row], dict[str, str]]:
    """Rows of iterations, and the parts of an iteration of the plain loop."""
    check(case)
    loops = [case.loop(filled, arguments) for arguments in LEARNERS.values()]
    others = Others()
    idle = alternate(loops, repeats, repeat_s)
    taken = others.cores()
    spent = loops[0].seconds()
    whole = sum(spent.values())
    with actor.busy():
        contended = alternate(loops[:2], repeats, repeat_s)
        paces = [actor.pace(loop, repeats * repeat_s) for loop in loops[:2]]
    idle_case, busy_case = f"{case.name}, an idle core", f"{case.name}, a busy Actor"
    rows = (
        Row.of(idle_case, "us", "lower", idle[1], "without", idle[0]),
        Row.of(idle_case, "us", "lower", idle[1], "2 Learner threads", idle[2]),
        Row.of(busy_case, "us", "lower", contended[1], "without", contended[0]),
    )
    parts = {
        "case": case.name,
        "without, us": f"{np.median(idle[0]):.4g}",
        **{f"{name} %": f"{100 * spent[name] / whole:.1f}" for name in ("sample", "gather", "train", "update")},
        "cores of others": f"{taken:.2f}",
        "Actor's steps/s": f"{paces[0]:,.0f}",
        "Actor's steps/s, prefetching": f"{paces[1]:,.0f}",
    }
    print("  ".join(f"{name} {value}" for name, value in parts.items()))
    return shown(rows), parts


def main() -> None:
    quick = options(__doc__, "a few cases").parse_args().quick
    one_thread("benchmarks.prefetch", pinned=False)
    torch.set_num_threads(1)
    repeats, repeat_s = (5, 0.02) if quick else (11, 0.02)
    actor = Actor()
    rows: list[Row] = []
    runs: list[dict[str, str]] = []
    for floats, algorithm in itertools.product((4, 376) if quick else OBSERVATIONS, ("DQN", "SAC")):
        cases = [Case(algorithm, *shape, floats) for shape in (SHAPES[:1] if quick else SHAPES)]
        filled = cases[0].filled(cases[0].slots)
        for case in cases:
            found, parts = measure(case, filled, actor, repeats, repeat_s)
            rows += found
            runs.append(parts)
    actor.end()
    if not quick:
        write("prefetch", "make bench-prefetch", 2, rows, kernels=_native.selected_learner_kernels(), runs=runs)


if __name__ == "__main__":
    main()
