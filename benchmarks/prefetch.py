"""What is gained by drawing the next batch on another thread while the Learner goes backward (setting 2 in C++).

One process; the loop without prefetching, with it, and, what a second core is good for otherwise, with two threads of
the Learner and no prefetching, by turns. Then the first two beside a process that steps CartPole-v1 on the same cores.
`--quick` is a look (a few cases, writes nothing); without it, benchmarks/results/prefetch.json is written.
"""

from __future__ import annotations

import argparse
import gc
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

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ.update(ONE_THREAD)  # before torch and NumPy are loaded

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402

from benchmarks.record import Row, write  # noqa: E402
from pearl import _native  # noqa: E402
from pearl.algorithms import DQN, SAC  # noqa: E402
from pearl.algorithms.trainer import policy_tensors  # noqa: E402
from pearl.backends.cpu.learner import NativeLearner  # noqa: E402
from pearl.ipc.queues import Bell, WeightSyncQueue  # noqa: E402
from pearl.replay import DataStorage, ReplayManager, make_replay_manager  # noqa: E402
from pearl.runtime.workers import GrantQueue, ProgressQueue, TrainingLoop  # noqa: E402
from pearl.spec import ReplaySpec, TransitionSpec  # noqa: E402

# Floats of an observation, and actions, as of CartPole, HalfCheetah and Humanoid, and of a long vector.
OBSERVATIONS = {4: 2, 17: 6, 376: 17, 4096: 6}
SHAPES = (((64, 64), 32), ((256, 256), 256))
SLOTS, SLOTS_OF_LONG_ROWS = 1_000_000, 100_000  # the long rows' columns take 3.3 GB
FILLED_AT_ONCE = 10_000
PUBLICATION_INTERVAL = 100
CHECKED_ITERATIONS = 20

PLAIN, PREFETCH, TWO_THREADS = "plain", "prefetch", "two threads"
LEARNERS: dict[str, dict[str, int | bool]] = {PLAIN: {}, PREFETCH: {"prefetch": True}, TWO_THREADS: {"threads": 2}}


@dataclass(frozen=True)
class Case:
    """One algorithm, network, batch size and count of floats in an observation."""

    algorithm: str
    hidden: tuple[int, ...]
    batch: int
    floats: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.algorithm} {'x'.join(map(str, self.hidden))} B={self.batch}, {self.floats} floats"

    @property
    def slots(self) -> int:
        """Of the replay."""
        return SLOTS if self.floats < 1000 else SLOTS_OF_LONG_ROWS

    def trainer(self) -> DQN | SAC:
        """With the same weights each time."""
        obs = spaces.Box(-1.0, 1.0, (self.floats,), np.float32)
        actions = OBSERVATIONS[self.floats]
        if self.algorithm == "DQN":
            return DQN(obs, spaces.Discrete(actions), hidden_sizes=self.hidden, seed=0)
        return SAC(obs, spaces.Box(-1.0, 1.0, (actions,), np.float32), hidden_sizes=self.hidden, seed=0)


@dataclass(frozen=True)
class Filled:
    """A replay whose every slot is written."""

    manager: ReplayManager
    storage: DataStorage
    spec: TransitionSpec

    @classmethod
    def of(cls, trainer: DQN | SAC, slots: int) -> Filled:
        """Random transitions of random priorities."""
        spec = TransitionSpec.from_spaces(trainer.observation_space, trainer.action_space)
        made = cls(make_replay_manager(ReplaySpec(slots), seed=0), DataStorage(spec, slots), spec)
        rng = np.random.default_rng(0)
        rows = spec.empty(min(slots, FILLED_AT_ONCE))
        for column in rows.values():
            column[...] = (
                rng.integers(0, 2, column.shape) if column.dtype == np.int64 else rng.uniform(-1, 1, column.shape)
            )
        rows["discount"][...] = 0.99
        for start in range(0, slots, FILLED_AT_ONCE):
            count = min(FILLED_AT_ONCE, slots - start)
            made.manager.insert(made.storage.insert(rows, count), rng.random(count, np.float32) + 0.01)
        return made


class Loop:
    """Setting 2's loop over a replay, with a Learner of its own."""

    def __init__(self, case: Case, filled: Filled, arguments: Mapping[str, int | bool]) -> None:
        self.trainer = case.trainer()
        learner, bell = NativeLearner(self.trainer, **arguments), Bell()  # type: ignore[arg-type]
        self._laq, self._ldq = GrantQueue(1), ProgressQueue(1, bell)
        self._loop = TrainingLoop(
            self._laq,
            self._ldq,
            WeightSyncQueue(learner.weight_count),
            bell,
            replay=filled.manager,
            storage=filled.storage,
            learner=learner,
            batch_size=case.batch,
            transition=filled.spec,
            weight_sync_interval=PUBLICATION_INTERVAL,
        )
        assert isinstance(self._loop.kernel, _native.TrainingLoop)
        self._kernel = self._loop.kernel

    def run(self, iterations: int) -> float:
        """Microseconds of an iteration."""
        self._laq.grant(iterations, 0.4)
        start = time.perf_counter()
        self._loop.run_once()
        taken = time.perf_counter() - start
        self._ldq.peek()
        self._ldq.release()
        return taken / iterations * 1e6

    def seconds(self) -> dict[str, float]:
        """That the loop's thread spent on each part so far."""
        found: dict[str, float] = self._kernel.seconds()
        return found


class DifferenceError(Exception):
    """Two contenders do not compute the same: comparing their speed would mean nothing."""


def check(case: Case) -> None:
    """With and without prefetching, the weights after some iterations have the same bits."""
    weights = []
    for kind in (PLAIN, PREFETCH):
        loop = Loop(case, Filled.of(case.trainer(), FILLED_AT_ONCE), LEARNERS[kind])
        loop.run(CHECKED_ITERATIONS)
        weights.append(torch.cat([t.detach().reshape(-1) for t in policy_tensors(loop.trainer)]))
    if not torch.equal(*weights):
        raise DifferenceError(f"{case.name}: with prefetching other weights are trained.")


def alternate(loops: Sequence[Loop], repeats: int, repeat_s: float) -> np.ndarray:
    """Microseconds of an iteration `(loops, repeats)`, the loops by turns."""
    calls = [max(2, round(repeat_s * 1e6 / loop.run(max(2, round(repeat_s * 1e6 / loop.run(5)))))) for loop in loops]
    values = np.empty((len(loops), repeats))
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            for turn in range(len(loops)):
                which = (turn + repeat) % len(loops)
                values[which, repeat] = loops[which].run(calls[which])
    finally:
        gc.enable()
    return values


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
    """A process that steps an environment where it is let, and counts."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._steps = context.Value("q", 0, lock=False)
        self._process = context.Process(target=step_forever, args=(self._steps,), daemon=True)
        self._process.start()
        while self._steps.value < 1000:
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """As one that is stopped can be ended."""
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let it work."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def pace(self, loop: Loop, seconds: float) -> float:
        """Its steps in a second while the loop runs."""
        iterations = max(2, round(seconds * 1e6 / loop.run(5)))
        start, before = time.perf_counter(), self._steps.value
        loop.run(iterations)
        return float(self._steps.value - before) / (time.perf_counter() - start)


class Others:
    """What other processes take of the cores, from when this is made."""

    def __init__(self) -> None:
        self._busy_s, self._start = self._of_others(), time.perf_counter()

    @staticmethod
    def _of_others() -> float:
        """Seconds of all processes but this one, on Linux; elsewhere they are not known."""
        try:
            user, nice, system = (int(v) for v in Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
        except OSError:
            return math.nan
        return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()

    def cores(self) -> float:
        """How many cores they kept busy."""
        return (self._of_others() - self._busy_s) / (time.perf_counter() - self._start)


def row(case: str, ours: np.ndarray, peer: str, theirs: np.ndarray) -> Row:
    low, middle, high = (float(v) for v in np.percentile(ours, (20, 50, 80)))
    return Row(case, middle, "us", "lower", (low, high), len(ours), peer, float(np.median(theirs)))


def measure(
    case: Case, filled: Filled, actor: Actor, repeats: int, repeat_s: float
) -> tuple[list[Row], dict[str, str]]:
    """Rows of iterations, and what the plain loop's consist of."""
    check(case)
    loops = [Loop(case, filled, arguments) for arguments in LEARNERS.values()]
    others = Others()
    idle = alternate(loops, repeats, repeat_s)
    taken = others.cores()
    spent = loops[0].seconds()
    whole = sum(spent.values())
    with actor.busy():
        beside = alternate(loops[:2], repeats, repeat_s)
        paces = [actor.pace(loop, repeats * repeat_s) for loop in loops[:2]]
    rows = [
        row(f"{case.name}, an idle core", idle[1], "without", idle[0]),
        row(f"{case.name}, an idle core", idle[1], "2 Learner threads", idle[2]),
        row(f"{case.name}, a busy Actor", beside[1], "without", beside[0]),
    ]
    parts = {
        "case": case.name,
        "without, us": f"{np.median(idle[0]):.4g}",
        **{f"{name} %": f"{100 * spent[name] / whole:.1f}" for name in ("sample", "gather", "train", "update")},
        "cores of others": f"{taken:.2f}",
        "Actor's steps/s": f"{paces[0]:,.0f}",
        "Actor's steps/s, prefetching": f"{paces[1]:,.0f}",
    }
    print("  ".join(f"{name} {value}" for name, value in parts.items()))
    for found in rows:
        print(f"    {found.case:48} {found.ours:9.2f} us  {found.peer:18} {found.theirs:9.2f} us  {found.ratio:.3f}x")
    return rows, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: a few cases, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    repeats, repeat_s = (5, 0.02) if quick else (11, 0.02)
    actor = Actor()
    rows: list[Row] = []
    runs: list[dict[str, str]] = []
    for floats, algorithm in itertools.product((4, 376) if quick else OBSERVATIONS, ("DQN", "SAC")):
        cases = [Case(algorithm, *shape, floats) for shape in (SHAPES[:1] if quick else SHAPES)]
        filled = Filled.of(cases[0].trainer(), cases[0].slots)
        for case in cases:
            found, parts = measure(case, filled, actor, repeats, repeat_s)
            rows += found
            runs.append(parts)
    actor.end()
    if not quick:
        write("prefetch", "make bench-prefetch", 2, rows, kernels=_native.selected_learner_kernels(), runs=runs)


if __name__ == "__main__":
    main()
