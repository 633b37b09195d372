"""The cost of working with FPGA pipelines on Intel's emulator.

Each stage of a pipeline is a kernel, which the emulator runs as a thread of the host: the times say nothing about a
board. The peer is the same work by the SYCL kernels on the CPU device. Rows are requests to the Replay Manager, steps
of the Learner, and iterations of setting 2 with both in one program, connected by pipes. The runs show how many stages
run at once, and the time of the first step, which generates, compiles (unless the kernels are in the cache) and
launches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import workload
from benchmarks.record import Row, shown, write
from benchmarks.timing import options
from benchmarks.workload import transitions
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.sycl.learner import SyclLearner
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.storage import SyclDataStorage
from pearl.replay import make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

SLOTS, FANOUT = 65_536, 16
WARM_UP = 5


@dataclass(frozen=True)
class Case(workload.Case):
    """A case with the count of copies of the pipeline."""

    copies: int
    floats = 8

    @property
    def actions(self) -> int:
        """Discrete actions, or numbers of a continuous one."""
        return 4 if self.algorithm == "DQN" else 2

    @property
    def name(self) -> str:
        """Algorithm and sizes, as tables show them."""
        return f"{super().name} DP={self.copies}"


CASES = [
    Case("DQN", (64, 64), 32, 1),
    Case("DQN", (64, 64), 32, 2),
    Case("DQN", (64, 64), 256, 2),
    Case("DQN", (256, 256), 32, 1),
    Case("DDPG", (64, 64), 32, 1),
    Case("TD3", (64, 64), 32, 1),
]


def milliseconds(work: Callable[[], object], repeats: int) -> np.ndarray:
    """Milliseconds of each of `repeats` calls."""
    for _ in range(WARM_UP):
        work()
    found = np.empty(repeats)
    for repeat in range(repeats):
        start = time.perf_counter()
        work()
        found[repeat] = (time.perf_counter() - start) * 1e3
    return found


def filled(backend: str, device: str | None = None) -> Any:
    """A Replay Manager whose every slot is written."""
    spec = ReplaySpec(SLOTS, fanout=FANOUT)
    made = make_replay_manager(spec, seed=0, backend=backend, device=device)
    made.insert(np.arange(SLOTS))
    return made


def replay_rows(repeats: int) -> list[Row]:
    """Requests of 32 and 2,048 items."""
    fpga, sycl = filled("fpga"), filled("sycl")
    found = []
    for count in (32, 2048):
        priorities = np.linspace(0.1, 1.0, count, dtype=np.float32)
        for what in ("sample", "update"):
            times = []
            for manager in (fpga, sycl):
                batch = manager.sample(count)
                sample = partial(manager.sample, count)
                update = partial(manager.update, batch.indices, priorities, batch.generations)
                times.append(milliseconds(sample if what == "sample" else update, repeats))
            case = f"{what} {count:,}, {SLOTS:,} slots"
            found.append(Row.of(case, "ms", "lower", times[0], "SYCL CPU device", times[1]))
    fpga.close()
    return found


def learner_rows(case: Case, repeats: int) -> tuple[list[Row], dict[str, object]]:
    """Steps; the first one generates and launches the stages. Then setting 2 in one program."""
    trainer, rng = case.trainer(), np.random.default_rng(0)
    spec = TransitionSpec.from_spaces(trainer.observation_space, trainer.action_space)
    batch, weights = transitions(spec, case.batch, rng), np.ones(case.batch, np.float32)
    fpga, sycl = FpgaLearner(trainer, sub_batches=case.copies), SyclLearner(case.trainer())
    start = time.perf_counter()
    fpga.step(batch, weights)
    first = time.perf_counter() - start
    times = [milliseconds(partial(learner.step, batch, weights), repeats) for learner in (fpga, sycl)]
    stages = fpga.kernel.stage_launches
    fpga.close()
    replay, storage = filled("fpga"), SyclDataStorage(spec, SLOTS, EMULATOR_SELECTOR)
    storage.insert(transitions(spec, SLOTS, rng))
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
        Row.of(f"step, {case.name}", "ms", "lower", times[0], "SYCL CPU device", times[1]),
        Row.of(f"iteration of setting 2, {case.name}", "ms", "lower", iteration),
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
    quick = options(__doc__, "two cases").parse_args().quick
    torch.set_num_threads(1)
    repeats = 21 if quick else 101
    rows = shown(replay_rows(repeats))
    runs: list[dict[str, object]] = []
    for case in CASES[:2] if quick else CASES:
        found, facts = learner_rows(case, repeats)
        rows += shown(found)
        runs.append(facts)
    if not quick:
        write("fpga", "make bench-fpga", 2, rows, runs=runs)


if __name__ == "__main__":
    main()
