"""SYCL devices compared with the CPU's own kernels, here on Intel's CPU device: the same hardware.

Iterations of setting 2 (sample, gather, train, update; replays of 100,000 transitions, all filled), each by its loop in
C++, in turn, in one process that sees one core, and in one that sees all. "As many empty launches" is the time that the
launches alone would take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.programs import limit_to
from benchmarks.record import Row, shown, write
from benchmarks.timing import alternate, options
from benchmarks.workload import Case, Filled, Loop

CAPACITY = 100_000
CASES = (
    ("DQN", (64, 64), 32), ("DQN", (64, 64), 512), ("DQN", (256, 256), 32), ("DQN", (256, 256), 512),
    ("DDPG", (256, 128), 32), ("DDPG", (256, 128), 512), ("SAC", (256, 256), 256),
)  # fmt: skip


def loop_of(case: Case, threads: int, selector: str = "") -> Loop:
    """Setting 2's loop of a case on a SYCL device or, without a selector, natively on `threads` threads."""
    from pearl.backends.cpu.learner import NativeLearner
    from pearl.backends.sycl.learner import SyclLearner
    from pearl.backends.sycl.storage import SyclDataStorage
    from pearl.replay import DataStorage, make_replay_manager
    from pearl.spec import ReplaySpec, TransitionSpec

    def make(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
        if selector:
            replay = make_replay_manager(ReplaySpec(slots), seed=0, backend="sycl", device=selector)
            return replay, SyclDataStorage(spec, slots, selector)
        return make_replay_manager(ReplaySpec(slots), seed=0), DataStorage(spec, slots)

    trainer = case.trainer()
    learner = SyclLearner(trainer, device=selector) if selector else NativeLearner(trainer, threads=threads)
    return Loop(learner, Filled.of(trainer, CAPACITY, make), case.batch, weight_sync_interval=8)


def measure(case: Case, cores: int, repeats: int, repeat_s: float) -> list[Row]:
    """Both loops in turn, and the launches of the SYCL device's loop."""
    loops = loop_of(case, cores, "opencl:cpu:0"), loop_of(case, cores)
    contenders = [loop.run_by_its_clocks for loop in loops]
    counts = [max(8, round(repeat_s * 1e6 / contender(20))) for contender in contenders]
    values = alternate(contenders, counts, repeats)
    queue = loops[0].learner.queue
    before = queue.launches
    loops[0].run(80)
    launches = (queue.launches - before) / 80
    empty = float(np.median(queue.launch_times_us(16, 50))) / 16
    name = f"iteration {case.name}, {'one core' if cores == 1 else f'{cores} cores'}"
    case_of_launches = f"{name}: {launches:.3g} launches"
    return [
        Row.of(name, "us", "lower", values[0], "native loop", values[1]),
        Row.of(case_of_launches, "us", "lower", values[0], "as many empty launches", launches * empty),
    ]


def on_cores(cores: int, quick: bool) -> list[Row]:
    """The rows of all cases, measured in a process that sees `cores` cores."""
    command = [sys.executable, "-m", "benchmarks.sycl", "--on-cores", str(cores), *(["--quick"] if quick else [])]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict.fromkeys(("DPCPP_CPU_NUM_CUS", "OMP_NUM_THREADS"), str(cores))},
        preexec_fn=limit_to(sorted(os.sched_getaffinity(0))[:cores]),
    )
    return [Row(**{**row, "spread": tuple(row["spread"])}) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = options(__doc__, "a few cases")
    parser.add_argument("--on-cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.on_cores:
        repeats, repeat_s = (3, 0.05) if quick else (15, 0.1)
        cases = [Case(*case) for case in (CASES[:2] if quick else CASES)]
        found = [row for case in cases for row in measure(case, arguments.on_cores, repeats, repeat_s)]
        print(json.dumps([asdict(row) for row in found]))
        return
    most = len(os.sched_getaffinity(0))
    rows = [row for cores in sorted({1, most}) for row in shown(on_cores(cores, quick))]
    if not quick:
        write("sycl", "make bench-sycl", most, rows)


if __name__ == "__main__":
    main()
