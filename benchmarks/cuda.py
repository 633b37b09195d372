"""PEARL's CUDA kernels on a GPU, and what PyTorch does there with the replay on the host.

The Replay Manager alone (1,000,000 slots, fanout 16): launches in a row, and from Python with the arrays in the host's
memory. Iterations of setting 2 (sample, gather, train, update; replays of 100,000 transitions, all filled) by the loop
in C++; beside them PyTorch's eager step on the GPU, with the native Replay Manager and Data Storage on the host.
`--device cuda:emulator` shows that everything works; its times mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.record import Row, shown, write
from benchmarks.timing import alternate, microseconds, options
from benchmarks.workload import Case, Filled, Loop
from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.learner import CudaLearner
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import DataStorage, make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

SLOTS = 1_000_000
CAPACITY = 100_000
CASES = (
    ("DQN", (64, 64), 32), ("DQN", (256, 256), 512), ("TD3", (256, 256), 256), ("SAC", (256, 256), 256),
    ("TD3", (256, 256), 32_768),
)  # fmt: skip


def replay_rows(device: str, slots: int, repeats: int, launches: int) -> Iterator[Row]:
    """The Replay Manager's operations."""
    replay = CudaReplayManager(slots, device=device, seed=0)
    replay.insert(np.arange(slots), np.random.default_rng(0).random(slots, np.float32) + 0.01)
    empty = [time / launches for time in replay.queue.launch_times_us(launches, repeats)]
    for batch in (256, 1024):
        priorities = replay.queue.shared_floats(batch)
        priorities[:] = 1.0
        kernel = replay.kernel

        def drawn(kernel: Any = kernel, batch: int = batch) -> None:
            kernel.launch_sample(batch, 0.4)

        def updated(kernel: Any = kernel, priorities: np.ndarray = priorities) -> None:
            kernel.launch_update(priorities)

        for name, launch in (("sample", drawn), ("update", updated)):
            times = [_in_a_row(launch, kernel.check, launches) for _ in range(repeats)]
            yield Row.of(
                f"{name} {batch:,} of {slots:,}, launches in a row", "us", "lower", times, "empty launch", empty
            )

        def from_python(batch: int = batch) -> None:
            sample = replay.sample(batch)
            replay.update(sample.indices, sample.weights, sample.generations)

        times = [microseconds(from_python, launches) for _ in range(repeats)]
        yield Row.of(f"sample and update {batch:,} of {slots:,}, from Python", "us", "lower", times)


def _in_a_row(launch: Callable[[], None], wait: Callable[[], None], count: int) -> float:
    def work() -> None:
        for _ in range(count):
            launch()
        wait()

    work()  # warms up
    return microseconds(work, 1) / count


def iteration_rows(
    device: str, capacity: int, repeats: int, iterations: int, cases: tuple[Case, ...], alone: bool
) -> Iterator[Row]:
    """Iterations of setting 2 and, unless `alone`, PyTorch's with the replay on the host."""

    def on_device(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
        replay = make_replay_manager(ReplaySpec(slots), seed=0, backend="cuda", device=device)
        return replay, CudaDataStorage(spec, slots, device)

    def on_host(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
        return make_replay_manager(ReplaySpec(slots), seed=0), DataStorage(spec, slots)

    for case in cases:
        trainer = case.trainer()
        learner = CudaLearner(trainer, device=device)
        ours = Loop(learner, Filled.of(trainer, capacity, on_device), case.batch, weight_sync_interval=8)
        if alone:
            times = [ours.run(iterations) for _ in range(repeats)]
            yield Row.of(f"iteration {case.name}", "us", "lower", times)
            continue
        theirs = _eager(case, "cpu" if device == EMULATOR else device, Filled.of(trainer, capacity, on_host))
        counts = [iterations, max(1, iterations // 4)]
        values = alternate([ours.run, lambda count, call=theirs: microseconds(call, count)], counts, repeats)
        yield Row.of(f"iteration {case.name}", "us", "lower", values[0], "torch eager, replay on host", values[1])


def _eager(case: Case, device: str, filled: Filled) -> Callable[[], None]:
    trainer = case.trainer(device=device) if device != "cpu" else case.trainer()
    learner = TorchLearner(trainer, device=device)
    learner.prepare()
    out = filled.spec.empty(case.batch)

    def iteration() -> None:
        sample = filled.manager.sample(case.batch)
        result = learner.step(filled.storage.gather(sample.indices, out), sample.weights)
        filled.manager.update(sample.indices, result.priorities, sample.generations)

    return iteration


def main() -> None:
    """Measure, print, and write benchmarks/results/cuda.json."""
    parser = options(__doc__, "smaller replays, one small case")
    parser.add_argument("--device", default="cuda:0", help="a CUDA device, or cuda:emulator")
    parser.add_argument("--alone", action="store_true", help="without PyTorch's iterations")
    arguments = parser.parse_args()
    quick = arguments.quick
    slots, capacity, repeats = (2_000, 2_000, 2) if quick else (SLOTS, CAPACITY, 15)
    launches, iterations = (2, 2) if quick else (200, 500)
    cases = tuple(Case(*case) for case in (CASES[:1] if quick else CASES))
    rows = shown(replay_rows(arguments.device, slots, repeats, launches))
    rows += shown(iteration_rows(arguments.device, capacity, repeats, iterations, cases, arguments.alone))
    if not quick and arguments.device != EMULATOR:
        write("cuda", "make bench-cuda", len(os.sched_getaffinity(0)), rows, device=_facts(arguments.device))


def _facts(device: str) -> dict[str, str]:
    import torch

    from pearl.backends.cuda.device import cuda_identity, cuda_index

    return {"identity": cuda_identity(cuda_index(device)), "torch": torch.__version__}


if __name__ == "__main__":
    main()
