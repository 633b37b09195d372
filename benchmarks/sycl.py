"""How fast are SYCL devices beside the CPU's own kernels, what do launches cost, how good are predictions.

Iterations of setting 2 (sample, gather, train, update), each by its loop in C++, on the SYCL CPU device and natively,
by turns in one process: once pinned to one core, once on all. Then the four placements of Replay Manager and Learner on
both, composed and run with `--bench`, beside their predictions. `--quick` is a look and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Row, write

CAPACITY = 100_000
CASES = (
    ("DQN", (64, 64), 32), ("DQN", (64, 64), 512), ("DQN", (256, 256), 32), ("DQN", (256, 256), 512),
    ("DDPG", (256, 128), 32), ("DDPG", (256, 128), 512), ("SAC", (256, 256), 256),
)  # fmt: skip
ON_BOTH = ("cpu0", "sycl:cpu0")


@dataclass(frozen=True)
class Case:
    """One algorithm, network and batch size."""

    algorithm: str
    hidden: tuple[int, ...]
    batch: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.algorithm} {'x'.join(map(str, self.hidden))} B={self.batch}"


class Loop:
    """Setting 2's loop of a case on a SYCL device or, without a selector, natively on `threads` threads."""

    def __init__(self, case: Case, threads: int, selector: str = "") -> None:
        from gymnasium import spaces

        from pearl import algorithms
        from pearl.backends.cpu.learner import NativeLearner
        from pearl.backends.sycl.learner import SyclLearner
        from pearl.backends.sycl.storage import SyclDataStorage
        from pearl.ipc.queues import Bell, WeightSyncQueue
        from pearl.replay import DataStorage, make_replay_manager
        from pearl.runtime.workers import GrantQueue, ProgressQueue, TrainingLoop
        from pearl.spec import ReplaySpec, TransitionSpec

        obs = spaces.Box(-1.0, 1.0, (4,), np.float32)
        actions: spaces.Space[Any] = spaces.Discrete(2)
        if case.algorithm != "DQN":
            actions = spaces.Box(-1.0, 1.0, (2,), np.float32)
        trainer = getattr(algorithms, case.algorithm)(obs, actions, hidden_sizes=case.hidden)
        spec = TransitionSpec.from_spaces(obs, actions)
        learner: Any
        storage: Any
        if selector:
            learner, storage = SyclLearner(trainer, device=selector), SyclDataStorage(spec, CAPACITY, selector)
            replay = make_replay_manager(ReplaySpec(CAPACITY), seed=0, backend="sycl", device=selector)
        else:
            learner, storage = NativeLearner(trainer, threads=threads), DataStorage(spec, CAPACITY)
            replay = make_replay_manager(ReplaySpec(CAPACITY), seed=0)
        rng = np.random.default_rng(0)
        rows = spec.empty(CAPACITY)
        for column in rows.values():
            column[...] = (
                rng.integers(0, 2, column.shape) if column.dtype == np.int64 else rng.normal(size=column.shape)
            )
        rows["discount"][:] = 0.99
        replay.insert(storage.insert(rows))
        self._bell = Bell()
        self._laq, self._ldq = GrantQueue(1), ProgressQueue(1, self._bell)
        self.learner = learner
        self._loop = TrainingLoop(
            self._laq, self._ldq, WeightSyncQueue(learner.weight_count), self._bell,
            replay=replay, storage=storage, learner=learner,
            batch_size=case.batch, transition=spec, weight_sync_interval=8,
        )  # fmt: skip
        assert type(self._loop.kernel).__name__ == "TrainingLoop", "a loop in C++ was expected"

    def run(self, iterations: int) -> float:
        """Microseconds of one of so many iterations."""
        before = sum(self._loop.kernel.seconds().values())
        self._laq.grant(iterations, 0.4)
        self._loop.run_once()
        self._ldq.peek()
        self._ldq.release()
        return (sum(self._loop.kernel.seconds().values()) - before) / iterations * 1e6


def measure(case: Case, cores: int, repeats: int, repeat_s: float) -> list[Row]:
    """Both loops by turns, and the launches of the device's."""
    loops = Loop(case, cores, "opencl:cpu:0"), Loop(case, cores)
    counts = [max(8, round(repeat_s * 1e6 / loop.run(20))) for loop in loops]
    values = np.empty((2, repeats))
    gc.collect()
    for repeat in range(repeats):
        for turn in range(2):
            which = (turn + repeat) % 2
            values[which, repeat] = loops[which].run(counts[which])
    queue = loops[0].learner.queue
    before = queue.launches
    loops[0].run(80)
    launches = (queue.launches - before) / 80
    empty = float(np.median(queue.launch_times_us(16, 50))) / 16
    low, middle, high = (float(v) for v in np.percentile(values[0], (20, 50, 80)))
    native = float(np.median(values[1]))
    on = "one core" if cores == 1 else f"{cores} cores"
    name = f"{case.name}, {on}"
    print(
        f"{name:34} {middle:8.1f} us  native {native:8.1f} ({native / middle:.2f}x)  {launches:.2f} launches of "
        f"{empty:.2f} us",
        flush=True,
    )
    return [
        Row(f"iteration {name}", middle, "us", "lower", (low, high), repeats, "native loop", native),
        Row(
            f"iteration {name}: {launches:.3g} launches", middle, "us", "lower", (low, high), repeats,
            "as many empty launches", launches * empty,
        ),
    ]  # fmt: skip


def predictions(quick: bool) -> list[Row]:
    """The four placements of a DQN on CartPole-v1, predicted and run."""
    from composer import Composer
    from pearl.algorithms import DQN
    from pearl.devices import discover, write_csv

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        write_csv(*discover(), here / "devices.csv", here / "connections.csv")
        for hidden, batch in (((64, 64), 64),) if quick else (((64, 64), 64), ((256, 256), 256)):
            composer = Composer(progress=False, calibration=here / "calibration.json")
            composer.set_device_file(here / "devices.csv")
            composer.set_connection_file(here / "connections.csv")
            composer.set_actors(1, env="CartPole-v1")
            composer.set_train_function(learner=DQN, hidden_sizes=hidden)
            composer.set_training(batch_size=batch)
            composer.set_replay(CAPACITY)
            composer.run()
            for replay in ON_BOTH:
                for learner in ON_BOTH:
                    placement = composer.placement.with_choice(replay_manager=replay, learner=learner)
                    program = composer.runtime_gen(placement=placement, path=here / "program.py", run_dir=here / "run")
                    found = [bench(program, here / "run") for _ in range(1 if quick else 5)]
                    low, middle, high = (float(v) for v in np.percentile(found, (20, 50, 80)))
                    case = f"EPS, RM on {replay}, Learner on {learner}: 2x{hidden[0]} B={batch}"
                    rows.append(Row(case, middle, "EPS", "higher", (low, high), len(found), "predicted", placement.eps))
                    print(f"{case:64} {middle:12,.0f}  predicted {placement.eps:12,.0f}", flush=True)
    return rows


def bench(program: Path, run_dir: Path) -> float:
    """Experiences trained per second while a batch was under way."""
    command = [sys.executable, str(program), "--bench", "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, capture_output=True)
    found: float = json.loads((run_dir / "bench.json").read_text(encoding="utf-8"))["measured_eps"]
    return found


def on_cores(cores: int, quick: bool) -> list[Row]:
    """The cases in a process of its own, which sees no more than `cores` cores."""
    command = [sys.executable, "-m", "benchmarks.sycl", "--on-cores", str(cores), *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    *shown, found = done.stdout.splitlines()
    print(*shown, sep="\n", flush=True)
    return [Row(**{**row, "spread": tuple(row["spread"])}) for row in json.loads(found)]


def measure_cases(cores: int, quick: bool) -> list[Row]:
    """All cases here."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    os.environ.update(dict.fromkeys(("DPCPP_CPU_NUM_CUS", "OMP_NUM_THREADS"), str(cores)))
    repeats, repeat_s = (3, 0.05) if quick else (15, 0.1)
    cases: Sequence[Case] = [Case(*case) for case in (CASES[:2] if quick else CASES)]
    return [row for case in cases for row in measure(case, cores, repeats, repeat_s)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: a few cases, nothing written")
    parser.add_argument("--on-cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_cores:
        print(json.dumps([asdict(row) for row in measure_cases(arguments.on_cores, arguments.quick)]))
        return
    most = len(os.sched_getaffinity(0))
    rows = [row for cores in sorted({1, most}) for row in on_cores(cores, arguments.quick)]
    rows += predictions(arguments.quick)
    if not arguments.quick:
        write("sycl", "make bench-sycl", most, rows)


if __name__ == "__main__":
    main()
