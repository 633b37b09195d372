"""FPGA pipelines on Intel's emulator: steps of the Learner, requests of the Replay Manager, and both as one program.

It says what working with the emulator costs, not what a board does: stages are threads of the host's. Beside each
stands the same work by the SYCL kernels on the CPU device. `--quick` is a look and writes nothing; without it,
benchmarks/results/fpga.json is written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.record import Row, write
from pearl.algorithms import DDPG, DQN, TD3, Trainer
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.sycl.learner import SyclLearner
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.storage import SyclDataStorage
from pearl.replay import make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

OBS = spaces.Box(-1.0, 1.0, (8,), np.float32)
SLOTS, FANOUT = 65_536, 16
WARM_UP = 5


@dataclass(frozen=True)
class Case:
    """One algorithm, network, batch size, and copies of the pipeline."""

    algorithm: type[Trainer]
    hidden: tuple[int, ...]
    batch: int
    copies: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.algorithm.__name__} {'x'.join(map(str, self.hidden))} B={self.batch} DP={self.copies}"

    def trainer(self) -> Any:
        """With the same weights each time."""
        actions = spaces.Discrete(4) if issubclass(self.algorithm, DQN) else spaces.Box(-1.0, 1.0, (2,), np.float32)
        return self.algorithm(OBS, actions, hidden_sizes=self.hidden, seed=0)


CASES = [
    Case(DQN, (64, 64), 32, 1),
    Case(DQN, (64, 64), 32, 2),
    Case(DQN, (64, 64), 256, 2),
    Case(DQN, (256, 256), 32, 1),
    Case(DDPG, (64, 64), 32, 1),
    Case(TD3, (64, 64), 32, 1),
]


def rows_of(spec: TransitionSpec, count: int) -> dict[str, np.ndarray]:
    """Random transitions."""
    rng = np.random.default_rng(0)
    rows = spec.empty(count)
    for column in rows.values():
        whole = column.dtype == np.int64
        column[...] = rng.integers(0, 4, column.shape) if whole else rng.uniform(-1, 1, column.shape)
    rows["discount"][...] = 0.99
    return rows


def milliseconds(work: Callable[[], object], repeats: int) -> np.ndarray:
    """Of each of `repeats` calls."""
    for _ in range(WARM_UP):
        work()
    found = np.empty(repeats)
    for repeat in range(repeats):
        start = time.perf_counter()
        work()
        found[repeat] = (time.perf_counter() - start) * 1e3
    return found


def row(name: str, ours: np.ndarray, peer: str = "", theirs: np.ndarray | None = None) -> Row:
    low, middle, high = (float(v) for v in np.percentile(ours, (20, 50, 80)))
    other = None if theirs is None else float(np.median(theirs))
    return Row(name, middle, "ms", "lower", (low, high), len(ours), peer, other)


def filled(backend: str, device: str | None = None) -> Any:
    """A Replay Manager whose every slot is written."""
    spec = ReplaySpec(SLOTS, fanout=FANOUT)
    made = make_replay_manager(spec, seed=0, backend=backend, device=device)
    made.insert(np.arange(SLOTS))
    return made


def replay_rows(repeats: int) -> list[Row]:
    """Requests of 32 and 2,048 items."""
    fpga, sycl = filled("fpga"), filled("sycl")
    found: list[Row] = []
    for count in (32, 2048):
        priorities = np.linspace(0.1, 1.0, count, dtype=np.float32)
        for what in ("sample", "update"):
            times = []
            for manager in (fpga, sycl):
                batch = manager.sample(count)
                sample = partial(manager.sample, count)
                update = partial(manager.update, batch.indices, priorities, batch.generations)
                times.append(milliseconds(sample if what == "sample" else update, repeats))
            found.append(row(f"{what} {count:,}, {SLOTS:,} slots", times[0], "SYCL CPU device", times[1]))
    fpga.close()
    return found


def learner_rows(case: Case, repeats: int) -> tuple[list[Row], dict[str, object]]:
    """Steps, the first of which generates and launches the stages; then setting 2 in one program."""
    trainer = case.trainer()
    spec = TransitionSpec.from_spaces(OBS, trainer.action_space)
    batch, weights = rows_of(spec, case.batch), np.ones(case.batch, np.float32)
    fpga, sycl = FpgaLearner(trainer, sub_batches=case.copies), SyclLearner(case.trainer())
    start = time.perf_counter()
    fpga.step(batch, weights)
    first = time.perf_counter() - start
    times = [milliseconds(partial(learner.step, batch, weights), repeats) for learner in (fpga, sycl)]
    stages = fpga.kernel.stage_launches
    fpga.close()
    replay, storage = filled("fpga"), SyclDataStorage(spec, SLOTS, EMULATOR_SELECTOR)
    storage.insert(rows_of(spec, SLOTS))
    joined = FpgaLearner(case.trainer(), sub_batches=case.copies)
    start = time.perf_counter()
    training = joined.fused_iteration(replay, storage, case.batch)
    assert training is not None
    training.train(0.4)
    first_joined = time.perf_counter() - start
    iteration = milliseconds(partial(training.train, 0.4), repeats)
    both = joined.kernel.stage_launches
    replay.close()
    found = [
        row(f"step, {case.name}", times[0], "SYCL CPU device", times[1]),
        row(f"iteration of setting 2, {case.name}", iteration),
    ]
    facts: dict[str, object] = {
        "case": case.name,
        "stages": stages,
        "first step, s": f"{first:.1f}",
        "stages with the Replay Manager": both,
        "first iteration, s": f"{first_joined:.1f}",
    }
    print("  ".join(f"{name} {value}" for name, value in facts.items()))
    return found, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: two cases, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    repeats = 21 if quick else 101
    rows = replay_rows(repeats)
    runs: list[dict[str, object]] = []
    for case in CASES[:2] if quick else CASES:
        found, facts = learner_rows(case, repeats)
        rows += found
        runs.append(facts)
    for made in rows:
        beside = "" if made.theirs is None else f"  {made.peer} {made.theirs:8.3f} ms"
        print(f"{made.case:60} {made.ours:8.3f} ms{beside}")
    if not quick:
        write("fpga", "make bench-fpga", 2, rows, runs=runs)


if __name__ == "__main__":
    main()
