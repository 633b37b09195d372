"""PEARL's CUDA kernels on a GPU, compared with PyTorch there and the replay on the host.

The Replay Manager alone (1,000,000 slots, fanout 16): in a graph of launches, as loops launch it, and from Python with
the arrays in the host's memory; updates in a graph repeat one batch, which then lies in the GPU's caches. Copies
between host and device, each waited for. Gathering Atari transitions from the device's memory, and from the host's,
where the kernel reads them; with the launch and the wait, compared with a copy of as many bytes.

Iterations of setting 2 (sample, gather, train, update; replays of 100,000 transitions, all filled) by the loop in C++.
Their peers:

- the same loop without the blocks' own memory, where each operation reads weights and values in the GPU's memory;
- where passes run side by side, the same loop with one after the other;
- PyTorch's eager step on the GPU, with the native Replay Manager and Data Storage on the host;
- the same iteration in torch operations alone in a CUDA graph, which neither publishes a policy nor draws noise; with
  `--compiled`, also compiled.

Last, a network of convolutions, trained by torch.
`--device cuda:emulator` shows that everything works; its times mean nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.record import Row, shown, write
from benchmarks.timing import alternate, microseconds, options
from benchmarks.workload import Case, Filled, Loop
from pearl.algorithms import DQN
from pearl.backends.cuda.device import EMULATOR, cuda_name
from pearl.backends.cuda.learner import CudaLearner
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.backends.cuda.runtime import open_cuda
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import DataStorage, make_replay_manager
from pearl.spec import FieldSpec, ReplaySpec, TransitionSpec

SLOTS = 1_000_000
CAPACITY = 100_000
REPEAT_S = 0.1
ATARI_SLOTS, ATARI_BATCH, PIXEL_BATCH = 20_000, 512, 512
COPIED = (64, 64 << 10, 1 << 20, 64 << 20)
CASES = (
    ("DQN", (64, 64), 32), ("DQN", (256, 256), 512), ("TD3", (256, 256), 256), ("SAC", (256, 256), 256),
    ("TD3", (256, 256), 32_768),
)  # fmt: skip


def replay_rows(device: str, slots: int, repeats: int, launches: int) -> Iterator[Row]:
    """The Replay Manager's operations, `launches` in a recorded graph."""
    replay = CudaReplayManager(slots, device=device, seed=0)
    replay.insert(np.arange(slots), np.random.default_rng(0).random(slots, np.float32) + 0.01)
    empty = [time / launches for time in replay.queue.launch_times_us(launches, repeats)]
    for batch in (256, 1024):
        priorities = replay.queue.shared_floats(batch)
        priorities[:] = 1.0
        both = np.zeros(repeats)
        for name, given in (("sample", None), ("update", priorities)):
            times = replay.kernel.times_us(batch, given, launches, repeats)
            both += times
            yield Row.of(f"{name} {batch:,} of {slots:,}, in a graph", "us", "lower", times, "empty launch", empty)
        theirs = [] if device == EMULATOR else _torch_replay_us(device, slots, batch, launches, repeats)
        case = f"sample, then update {batch:,} of {slots:,}, in a graph"
        yield Row.of(case, "us", "lower", both, "torch: cumulative sum and search", theirs)

        def from_python(batch: int = batch) -> None:
            sample = replay.sample(batch)
            replay.update(sample.indices, sample.weights, sample.generations)

        from_python()
        times = [microseconds(from_python, launches) for _ in range(repeats)]
        yield Row.of(f"sample and update {batch:,} of {slots:,}, from Python", "us", "lower", times)


def _torch_replay_us(device: str, slots: int, batch: int, launches: int, repeats: int) -> list[float]:
    """Microseconds of a draw and an update in torch, of `launches` in a graph."""
    import torch

    from benchmarks.cuda_torch import TorchReplay, graph_of

    replay = TorchReplay.filled(slots, device)
    priorities = torch.ones(batch, device=device)

    def work() -> None:
        for _ in range(launches):
            replay.update(replay.draw(batch)[0], priorities)

    launch = graph_of(work)

    def timed() -> None:
        launch()
        torch.cuda.synchronize()

    return [microseconds(timed, 1) / launches for _ in range(repeats + 1)][1:]


def gather_rows(device: str, slots: int, repeats: int) -> Iterator[Row]:
    """Gathering Atari transitions, from the device's memory and from the host's without a copy; the peer is a copy."""
    image = FieldSpec("obs", (4, 84, 84), "uint8")
    spec = TransitionSpec((image, dataclasses.replace(image, name="next_obs"), FieldSpec("reward", (), "float32")))
    rng = np.random.default_rng(0)
    rows = {f.name: rng.integers(0, 256, (slots, *f.shape)).astype(f.dtype) for f in spec.fields}
    nbytes = ATARI_BATCH * spec.nbytes
    for memory, read in (("device", False), ("pinned", True)):
        storage = CudaDataStorage(spec, slots, device, memory=memory)
        storage.insert(rows)
        drawn = [rng.integers(0, slots, ATARI_BATCH) for _ in range(repeats + 1)]
        queue, kernel = storage.queue, storage.kernel

        def gather(indices: np.ndarray, kernel: Any = kernel) -> object:
            return kernel.gather_there(indices)

        times = [microseconds(functools.partial(gather, indices), 1) for indices in drawn][1:]
        if read:
            peer, plain = "copy from pinned memory", queue.copy_times_us(nbytes, True, repeats, pinned=True)
        else:
            peer, plain = "copy within the device", queue.memory_times_us(nbytes, repeats)
        ours, theirs = ([nbytes / time / 1e3 for time in found] for found in (times, plain))
        case = f"gather {ATARI_BATCH} Atari transitions from {memory} memory"
        yield Row.of(case, "GB/s", "higher", ours, peer, theirs)
        storage.close()


def copy_rows(device: str, sizes: tuple[int, ...], repeats: int) -> Iterator[Row]:
    """Copies between the host and the device, from and to pinned memory and memory that is not."""
    queue = open_cuda(device).queue
    for direction, to_device in (("to", True), ("from", False)):
        for nbytes in sizes:
            pinned, pageable = (queue.copy_times_us(nbytes, to_device, repeats, pinned=held) for held in (True, False))
            case = f"copy {nbytes:,} bytes {direction} the device, pinned"
            yield Row.of(case, "us", "lower", pinned, "not pinned", pageable)


class CutLearner(CudaLearner):
    """With options for how a step is divided."""

    def __init__(self, trainer: Any, device: str, **cut: Any) -> None:
        self._cut = cut
        super().__init__(trainer, device=device)

    def _make(self, *arguments: Any) -> Any:
        return self._module.Learner(*arguments, **self._cut)

    @property
    def in_branches(self) -> bool:
        """Whether passes of the last batch ran side by side."""
        return bool(self._kernel.branches > 1)


def iteration_rows(
    device: str,
    capacity: int,
    repeats: int,
    iterations: int,
    intervals: tuple[int, ...],
    cases: tuple[Case, ...],
    alone: bool,
    compiled: bool,
) -> Iterator[Row]:
    """Iterations of setting 2 and, unless `alone`, with steps in PyTorch; `intervals`: how many are one graph."""
    for case in cases:
        trainer = case.trainer()
        learner = CutLearner(trainer, device)
        filled = Filled.of(trainer, capacity, _on_device(device))
        for interval in intervals:
            ours = Loop(learner, filled, case.batch, weight_sync_interval=interval)
            ours.run(2 * interval)  # records
            count = _count(ours.run, iterations)
            times = [ours.run(count) for _ in range(repeats)]
            yield Row.of(f"iteration {case.name}, policy every {interval}", "us", "lower", times)
        cuts: dict[str, dict[str, Any]] = {"without the blocks' own memory": {"block_bytes": 0}}
        if learner.in_branches:
            cuts["one pass after the other"] = {"branches": False}
        peers: dict[str, Callable[[int], float]] = {}
        for name, cut in cuts.items():
            other = Loop(CutLearner(case.trainer(), device, **cut), filled, case.batch, weight_sync_interval=interval)
            other.run(2 * interval)
            peers[name] = other.run
        if not alone:
            peers |= _in_torch(case, trainer, device, capacity, compiled)
        contenders = [ours.run, *peers.values()]
        values = alternate(contenders, [_count(contender, iterations) for contender in contenders], repeats)
        for name, theirs in zip(peers, values[1:], strict=True):
            yield Row.of(f"iteration {case.name}, policy every {interval}", "us", "lower", values[0], name, theirs)


def _in_torch(
    case: Case, trainer: Any, device: str, capacity: int, compiled: bool
) -> dict[str, Callable[[int], float]]:
    """What measures iterations with steps in PyTorch."""
    there = "cpu" if device == EMULATOR else device
    eager = _eager(case, there, Filled.of(trainer, capacity, _on_host))
    found = {"torch eager, replay on host": functools.partial(_repeated, eager)}
    found["torch in a CUDA graph"] = _torch_iterations(case, capacity, there, compiled=False)
    if compiled and device != EMULATOR:
        found["torch compiled, in a CUDA graph"] = _torch_iterations(case, capacity, there, compiled=True)
    if device != EMULATOR:  # where torch works elsewhere
        found["this toolkit's torch Learner"] = _torch_learner(
            case.trainer(device=device), case.batch, capacity, device
        )
    return found


def _count(contender: Callable[[int], float], most: int) -> int:
    """So many iterations that a repeat takes about REPEAT_S: a power of two, at most `most`."""
    fitting = max(2, min(most, int(REPEAT_S * 1e6 / contender(min(most, 8)))))
    return 1 << fitting.bit_length() - 1


def _torch_iterations(case: Case, slots: int, device: str, *, compiled: bool) -> Callable[[int], float]:
    """Microseconds of an iteration in torch operations alone, mean of as many as are asked for."""
    import torch

    from benchmarks.cuda_torch import TorchIterations

    iterations = TorchIterations(case, slots, device, compiled=compiled)
    launch = iterations.launched()

    def timed(count: int) -> float:
        calls = max(1, count // iterations.together)
        start = time.perf_counter()
        for _ in range(calls):
            launch()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls / iterations.together * 1e6

    return timed


def pixel_rows(device: str, capacity: int, repeats: int, iterations: int, compiled: bool) -> Iterator[Row]:
    """Nature CNN: torch's steps in graphs with the replay on the GPU; as written, or compiled, with it on the host."""
    images, actions = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)

    def trainer() -> Any:
        return DQN(images, actions, seed=0, device=device)

    ours = _torch_learner(trainer(), PIXEL_BATCH, capacity, device)
    host = Filled.of(trainer(), capacity, _on_host)
    peers = {"torch eager, replay on host": _eager_of(trainer(), PIXEL_BATCH, device, host)}
    if compiled:
        import torch

        theirs = trainer()
        theirs.update_policy = torch.compile(theirs.update_policy)
        peers["torch compiled, replay on host"] = _eager_of(theirs, PIXEL_BATCH, device, host)
    contenders = [ours, *(functools.partial(_repeated, call) for call in peers.values())]
    for contender in contenders:
        contender(8)  # records, compiles
    values = alternate(contenders, [_count(contender, iterations) for contender in contenders], repeats)
    for name, found in zip(peers, values[1:], strict=True):
        yield Row.of(f"iteration DQN Nature CNN B={PIXEL_BATCH}", "us", "lower", values[0], name, found)


def _on_device(device: str) -> Callable[[TransitionSpec, int], tuple[Any, Any]]:
    """Makes a Replay Manager and a Data Storage there."""

    def made(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
        replay = make_replay_manager(ReplaySpec(slots), seed=0, backend="cuda", device=device)
        return replay, CudaDataStorage(spec, slots, device)

    return made


def _on_host(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
    return make_replay_manager(ReplaySpec(slots), seed=0), DataStorage(spec, slots)


def _torch_learner(trainer: Any, batch: int, capacity: int, device: str) -> Callable[[int], float]:
    """Microseconds of an iteration of the torch Learner with the replay on its GPU: the mean of many."""
    learner = TorchLearner(trainer, device=device)
    learner.prepare()
    filled = Filled.of(trainer, capacity, _on_device(device))
    iteration = learner.fused_iteration(filled.manager, filled.storage, batch)
    assert iteration is not None, "its batches stay on the GPU"

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            iteration.train(0.4)
        iteration.finish()
        return (time.perf_counter() - start) / count * 1e6

    timed(16)  # records
    return timed


def _repeated(call: Callable[[], None], count: int) -> float:
    return microseconds(call, count)


def _eager(case: Case, device: str, filled: Filled) -> Callable[[], None]:
    trainer = case.trainer(device=device) if device != "cpu" else case.trainer()
    return _eager_of(trainer, case.batch, device, filled)


def _eager_of(trainer: Any, batch: int, device: str, filled: Filled) -> Callable[[], None]:
    learner = TorchLearner(trainer, device=device, capture=False)
    learner.prepare()
    out = filled.spec.empty(batch)

    def iteration() -> None:
        sample = filled.manager.sample(batch)
        result = learner.step(filled.storage.gather(sample.indices, out), sample.weights)
        filled.manager.update(sample.indices, result.priorities, sample.generations)

    return iteration


def main() -> None:
    """Measure, print, and write benchmarks/results/cuda.json."""
    parser = options(__doc__, "smaller replays, one small case")
    parser.add_argument("--device", default="cuda:0", help="a CUDA device, or cuda:emulator")
    parser.add_argument("--alone", action="store_true", help="without PyTorch's iterations")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, which takes minutes")
    arguments = parser.parse_args()
    quick, device = arguments.quick, cuda_name(arguments.device)
    slots, capacity, repeats = (2_000, 2_000, 2) if quick else (SLOTS, CAPACITY, 15)
    launches, iterations, intervals = (2, 2, (2, 8)) if quick else (64, 512, (8, 64))
    cases = tuple(Case(*case) for case in (CASES[:1] if quick else CASES))
    parts: list[Iterator[Row]] = [
        replay_rows(device, slots, repeats, launches),
        copy_rows(device, COPIED[:2] if quick else COPIED, repeats),
        gather_rows(device, 600 if quick else ATARI_SLOTS, repeats),
        iteration_rows(device, capacity, repeats, iterations, intervals, cases, arguments.alone, arguments.compiled),
    ]
    if device != EMULATOR and not arguments.alone:
        parts.append(pixel_rows(device, 2_000 if quick else ATARI_SLOTS, repeats, 50, arguments.compiled))
    rows: list[Row] = []
    for part in parts:
        for row in part:
            rows += shown([row])
            sys.stdout.flush()
            if not quick and device != EMULATOR:  # after each row: the machine may be given back meanwhile
                write("cuda", "make bench-cuda", len(os.sched_getaffinity(0)), rows, device=_facts(device))


def _facts(device: str) -> dict[str, str]:
    import torch

    from pearl.backends.cuda.device import cuda_identity, cuda_index

    return {"identity": cuda_identity(cuda_index(device)), "torch": torch.__version__}


if __name__ == "__main__":
    main()
