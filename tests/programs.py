"""Composes, generates and runs runtime programs, as a user at a shell does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainers import TinyDQN

from composer import Composer

DEVICE_HEADER = "name,kind,backend,selector,cores,active_watts"
CONNECTION_HEADER = "source,target,latency_us,bandwidth_gbps"
ONE_CPU = ("cpu0,cpu,cpu,,2,60",)
TWO_CPUS = (*ONE_CPU, "cpu1,cpu,cpu,,2,60")
WITHOUT_FLUSHING = Path(__file__).parent / "fixtures" / "without_flushing"

CsvPair = Callable[..., tuple[Path, Path]]
_T = TypeVar("_T")


def write_csv_pair(folder: Path, devices: Sequence[str], connections: Sequence[str] = ()) -> tuple[Path, Path]:
    pair = folder / "devices.csv", folder / "connections.csv"
    for path, header, rows in zip(pair, (DEVICE_HEADER, CONNECTION_HEADER), (devices, connections), strict=True):
        path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return pair


def write_machine(folder: Path, setting: int) -> tuple[Path, Path]:
    """Both CSV files of a machine with the devices that a setting needs: each is profiled."""
    return write_csv_pair(folder, TWO_CPUS, ["cpu0,cpu1,1,10"]) if setting == 1 else write_csv_pair(folder, ONE_CPU)


def described(
    files: tuple[Path, Path],
    *,
    trainer: type = TinyDQN,
    settings: dict[str, Any] | None = None,
    env: str = "CartPole-v1",
    env_kwargs: dict[str, Any] | None = None,
    actors: int = 1,
    capacity: int = 2000,
    mode: Any = "prioritized",
    fanout: int | str = 16,
    training: dict[str, Any] | None = None,
    learners: dict[str, Any] | None = None,
    progress: bool = False,
    calibration: Path | None = None,
) -> Composer:
    """A composer that has been told everything and has not run yet."""
    composer = Composer(progress=progress, calibration=calibration)
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    composer.set_actors(actors, env=env, envs_per_actor=4, env_kwargs=env_kwargs)
    composer.set_train_function(learner=trainer, **(settings or {}))
    composer.set_replay(capacity, mode=mode, fanout=fanout)
    composer.set_training(**(training or {}))
    if learners is not None:
        composer.set_learners(**learners)
    return composer


def make_program(
    folder: Path, *, setting: int = 2, name: str = "program", timesteps: int = 1100, **problem: Any
) -> Path:
    """Write `folder/name.py` for one CPU (setting 2), or with the Learner forced to a second one (setting 1)."""
    composer = described(write_machine(folder, setting), **problem)
    replay, learner = composer.run()
    replay = dataclasses.replace(replay, device="cpu0")
    learner = dataclasses.replace(learner, device="cpu0" if setting == 2 else "cpu1")
    return composer.runtime_gen(replay, learner, folder / f"{name}.py", timesteps=timesteps)


class Running:
    """A program under way in a process group of its own, as a shell starts it."""

    def __init__(self, program: Path, *arguments: str, cwd: Path | None = None) -> None:
        self._output = program.with_suffix(f".{time.monotonic_ns()}.output")
        paths = filter(None, [str(WITHOUT_FLUSHING), os.environ.get("PYTHONPATH")])
        with self._output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *arguments],
                cwd=cwd or program.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float = 120.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"The program is still running after {timeout_s} s:\n{self.output}") from None

    def until(self, condition: Callable[[], _T], timeout_s: float = 60.0) -> _T:
        """Wait until `condition()` is true, and return it; the program must not end before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            assert self.process.poll() is None, f"The program ended early:\n{self.output}"
            time.sleep(0.02)
        raise AssertionError(f"{condition} was not met in {timeout_s} s:\n{self.output}")

    def actor_pids(self) -> list[int]:
        """The living actor processes."""
        return [pid for pid in children(self.process.pid) if b"--multiprocessing-fork" in command_line(pid)]

    def interrupt(self) -> None:
        """Ctrl-C: the whole group gets it, as from a terminal."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextlib.contextmanager
def running(program: Path, *arguments: str) -> Iterator[Running]:
    """A started program; whatever is left of it at the end is killed."""
    started = Running(program, *arguments)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def run(program: Path, *arguments: str) -> tuple[int, str]:
    """Run to the end; exit code and all output."""
    with running(program, *arguments) as started:
        code = started.wait()
        return code, started.output


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(parent: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def program_of(composer: Composer, folder: Path, replay: str, learner: str, **changed: Any) -> Path:
    """The program for a pair of devices of the placement."""
    placement = composer.placement.with_choice(replay_manager=replay, learner=learner, **changed)
    name = f"{replay}-{learner}".replace(":", "_")
    return composer.runtime_gen(placement=placement, path=folder / f"{name}.py", timesteps=2000)


def summary(run_dir: Path) -> dict[str, Any]:
    """What a run left of itself."""
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found
