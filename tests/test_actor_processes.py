"""Actor processes whose environments crash, hang, fork and start processes: none is missed, none outlives the host."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from programs import is_alive
from trainers import TinyDQN
from unruly import LONG_MESSAGE, note_program, unruly_setup

from composer.profiling.actors import measure_actor
from pearl.actors import process, report
from pearl.actors import waiting as waiting_module
from pearl.actors.child_process import ChildProcess, signal_name
from pearl.actors.notices import NO_NOTICES
from pearl.actors.process import ActorGroup
from pearl.actors.report import LONGEST_GAP_S, Report, Silence
from pearl.actors.shared_warnings import SharedWarnings
from pearl.actors.waiting import end_waiting, start_waiting
from pearl.errors import ActorError
from pearl.ipc.queues import WeightSyncQueue
from pearl.runtime import supervision
from pearl.runtime.evaluation import evaluate
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import TransitionSpec

LONGEST_S = 60.0

Group = Callable[..., tuple[ActorGroup, list[DataCollectionQueue]]]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """`group(fate, count)` starts actors in environments of such a fate."""
    started: list[ActorGroup] = []

    def start(fate: str, count: int = 1, **options: float) -> tuple[ActorGroup, list[DataCollectionQueue]]:
        setups = [unruly_setup(fate, tmp_path, index, count) for index in range(count)]
        env = gym.make("Unruly-v0")
        transition = TransitionSpec.from_spaces(env.observation_space, env.action_space)
        queues = [DataCollectionQueue(transition, setup.message_rows(), 2) for setup in setups]
        actors = ActorGroup(setups, queues, WeightSyncQueue(8), **options)  # type: ignore[arg-type]
        started.append(actors)
        return actors, queues

    yield start
    for actors in started:
        actors.stop(0.1)


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, "not met in time"
        meanwhile()
        time.sleep(0.03)


def children_of_environments(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.pid")]


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_long_traceback_is_told_in_its_beginning_and_end(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    actors, queues = group("fails at length")
    until(lambda: actors.restarts == 1, lambda: actors.check(0))
    (told,) = caplog.messages
    assert "actor-0 died (exit code 1)" in told
    assert "in _misbehave" in told, "the line that failed"
    assert "the beginning" in told
    assert told.endswith("the end")
    assert "bytes are left out" in told
    assert len(told) < len(LONG_MESSAGE) / 5
    until(lambda: len(queues[0]))  # the one that was started in its place


def test_a_child_that_the_environment_forked_does_not_hide_a_death(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actors, queues = group("forks")
    until(lambda: actors.restarts == 1, lambda: actors.check(0))
    assert "actor-0 died (signal SIGKILL) and is restarted." in caplog.messages
    (child,) = children_of_environments(tmp_path)
    until(lambda: not is_alive(child))
    until(lambda: len(queues[0]))


def test_a_thread_of_the_environment_does_not_hide_a_failure(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    actors, _ = group("fails with a thread")
    until(lambda: actors.restarts == 1, lambda: actors.check(0))
    (told,) = caplog.messages
    assert "actor-0 died (exit code 1)" in told
    assert "the feed is lost" in told


def test_a_real_time_signal_is_named(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    actors, _ = group("real-time signal")
    until(lambda: actors.restarts == 1, lambda: actors.check(0))
    assert "actor-0 died (signal SIGRTMIN+3) and is restarted." in caplog.messages
    assert [signal_name(number) for number in (9, 34, 35, 64, 99)] == [
        *("SIGKILL", "SIGRTMIN", "SIGRTMIN+1", "SIGRTMAX", "99")
    ]


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time as the group sees it; it passes when the test says so."""
    now = SimpleNamespace(s=time.monotonic())
    for module in (process, report):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.mark.parametrize("place", ["constructor", "step"])
def test_one_hung_actor_of_two_is_named_and_restarted(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: SimpleNamespace, place: str
) -> None:
    actors, queues = group(f"hangs in {place}", 2, timeout_s=90.0)
    until(lambda: children_of_environments(tmp_path) and sum(len(q) == 2 for q in queues) == 1)
    (hung,) = (index for index, queue in enumerate(queues) if not len(queue))
    pids = actors.pids

    def second() -> None:
        clock.s += 1.0
        actors.check(0)

    until(lambda: caplog.messages, second)
    (named,) = caplog.messages
    doing = "made" if place == "constructor" else "stepped"
    assert f"actor-{hung} (process {pids[hung]}) has given no sign of life for 61 s, while it {doing} its env" in named
    assert "--actor-timeout" in named
    # The other one waits for room in its queue, which nobody empties: it is not silent.
    until(lambda: actors.restarts == 1, second)
    restarted = caplog.messages[-1]
    assert f"actor-{hung} died (process {pids[hung]} hung for 91 s while it {doing} its environments)" in restarted
    assert len(caplog.messages) == 2
    assert actors.pids[1 - hung] == pids[1 - hung]
    assert not any(map(is_alive, [pids[hung], *children_of_environments(tmp_path)]))
    until(lambda: len(queues[hung]))


def test_an_actor_is_not_silent_while_the_host_does_not_listen(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: SimpleNamespace
) -> None:
    actors, _ = group("hangs in step")
    until(lambda: children_of_environments(tmp_path))
    actors.check(0)
    clock.s += 10_000.0  # the host evaluated, or was suspended
    actors.check(0)
    assert not caplog.messages


def test_an_actor_that_never_starts_is_given_up(
    group: Group, tmp_path: Path, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    actors, _ = group("hangs in constructor", timeout_s=5.0)

    def hang_again() -> None:
        (tmp_path / "once").unlink(missing_ok=True)
        until(lambda: (tmp_path / "once").exists())
        for _ in range(7):
            clock.s += 1.0
            actors.check(0)
        clock.s += 1000.0  # deaths of long ago do not count

    hang_again()
    hang_again()
    assert actors.restarts == 2
    with pytest.raises(ActorError, match=r"actor-0 hung 3 times in a row.*--actor-timeout more seconds"):
        hang_again()


# --- the end ----------------------------------------------------------------------------------------------------------


def test_an_actor_that_has_not_begun_is_ended_quietly(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actors, _ = group("hangs in constructor")
    until(lambda: children_of_environments(tmp_path))
    pids = [*actors.pids, *children_of_environments(tmp_path)]
    actors.stop(LONGEST_S)
    assert not caplog.messages
    until(lambda: not any(map(is_alive, pids)))


def test_a_child_that_an_environment_leaves_delays_nothing(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actors, _ = group("leaves a child")
    until(lambda: children_of_environments(tmp_path))
    pids = [*actors.pids, *children_of_environments(tmp_path)]
    actors.stop(LONGEST_S)
    assert not caplog.messages
    assert not any(map(is_alive, pids))


HOST = """
import sys, time
from pathlib import Path
from pearl.actors.process import ActorGroup
from pearl.actors.waiting import end_waiting, start_waiting
from pearl.runtime.evaluation import evaluate
from pearl.ipc.queues import WeightSyncQueue
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import TransitionSpec
from unruly import Unruly, unruly_setup

if __name__ == "__main__":
    env = Unruly()
    transition = TransitionSpec.from_spaces(env.observation_space, env.action_space)
    setup = unruly_setup("hangs in step", Path(sys.argv[1]))
    group = ActorGroup([setup], [DataCollectionQueue(transition, setup.message_rows(), 2)], WeightSyncQueue(8))
    print(*group.pids, flush=True)
    time.sleep(600)
"""


def test_neither_a_hung_actor_nor_its_children_outlive_a_killed_host(tmp_path: Path) -> None:
    program = tmp_path / "host.py"
    program.write_text(HOST)
    with subprocess.Popen(
        [sys.executable, program, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    ) as host:
        try:
            assert host.stdout is not None
            pid = int(host.stdout.readline())
            until(lambda: children_of_environments(tmp_path))
            assert is_alive(pid)
        finally:
            host.kill()
    until(lambda: not any(map(is_alive, [pid, *children_of_environments(tmp_path)])))


# --- processes of environments, and of the program --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["actor", "composing", "evaluation"])
def test_environments_may_start_processes(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    setup = unruly_setup("pool", tmp_path)
    if where == "actor":
        actors, queues = group("pool")
        until(lambda: len(queues[0]), lambda: actors.check(0))
        assert actors.restarts == 0, caplog.messages
    elif where == "composing":
        assert len(measure_actor(setup, 0.0)) >= 10
    else:
        trainer = TinyDQN(spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2))
        found = evaluate(trainer, setup.spec, 2, seed=0)
        assert found is not None
        assert found.lengths.tolist() == [1, 1]


def test_a_process_without_the_program_hides_it_from_nobody(tmp_path: Path) -> None:
    program, seen, over = sys.modules["__main__"], set(), threading.Event()

    def look() -> None:
        while not over.wait(1e-5):
            seen.add(id(sys.modules["__main__"]))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        child = ChildProcess(note_program, (tmp_path / "main",), "child", without_program=True)
    finally:
        over.set()
        watcher.join()
    assert child.wait(LONGEST_S)
    assert child.exit_code == 0
    assert seen == {id(program)}
    assert (tmp_path / "main").read_text() == "None"


def test_a_process_starts_under_pdb_and_where_the_working_folder_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.delattr(sys.modules["__main__"], "__spec__")  # as pdb has it before Python 3.13
    child = ChildProcess(write_pid, (tmp_path / "pid",), "child", without_program=True)
    assert child.wait(LONGEST_S)
    assert (tmp_path / "pid").read_text(encoding="utf-8") == str(child.pid)
    with pytest.raises(FileNotFoundError):
        Path.cwd()


# --- interpreters that wait for an actor -----------------------------------------------------------------------------


@pytest.fixture
def waiting() -> Iterator[None]:
    yield
    end_waiting()


def write_pid(path: Path) -> None:
    path.write_text(str(os.getpid()), encoding="utf-8")


def test_an_actor_runs_in_an_interpreter_that_waits(waiting: None, group: Group) -> None:
    start_waiting(3)
    found = [interpreter.process.pid for interpreter in waiting_module._waiting]
    actors, queues = group("lives", 2)
    assert actors.pids == found[:2]
    for queue in queues:
        until(lambda queue=queue: queue.peek() is not None, lambda: actors.check(0))  # type: ignore[misc]
    assert actors.restarts == 0
    assert all(os.getpgid(pid) == pid for pid in actors.pids), "each leads its own group"
    assert not waiting_module._waiting
    assert not is_alive(found[2]), "nobody needed it"


def test_a_dead_interpreter_is_no_actor(waiting: None, tmp_path: Path) -> None:
    start_waiting(2)
    dead, alive = waiting_module._waiting
    dead.process.kill()
    dead.process.wait()
    for name in ("new", "waited"):
        child = ChildProcess(write_pid, (tmp_path / name,), name)
        assert child.wait(LONGEST_S)
        assert child.exit_code == 0
        assert child.pid not in (dead.process.pid,)
        assert int((tmp_path / name).read_text(encoding="utf-8")) == child.pid
    assert child.pid == alive.process.pid


def test_many_descriptors_get_the_numbers_that_they_have_here(waiting: None, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # numbers from 256 on are out of reach
    try:
        start_waiting(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    queues = [WeightSyncQueue(4) for _ in range(60)]
    child = ChildProcess(read_weights, (queues, tmp_path / "read"), "child")
    for number, queue in enumerate(queues):
        queue.write(np.full(4, number, np.float32))
    (tmp_path / "go").touch()
    assert child.wait(LONGEST_S)
    assert (tmp_path / "read").read_text(encoding="utf-8") == " ".join(map(str, range(60)))


def read_weights(queues: list[WeightSyncQueue], path: Path) -> None:
    until(lambda: (path.parent / "go").exists())
    found = [queue.reader().poll() for queue in queues]
    path.write_text(" ".join(str(int(weights[0])) for weights in found if weights is not None), encoding="utf-8")


@pytest.mark.parametrize(("options", "count"), [((), 2), (("--serial",), 0), (("--help",), 0)])
def test_a_program_that_ends_early_leaves_no_interpreter(options: tuple[str, ...], count: int) -> None:
    code = (
        "from pearl.runtime.entry import begin_program; begin_program(actors=2)\n"
        "from pearl.actors import waiting; print(*(w.process.pid for w in waiting._waiting))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=LONGEST_S, check=True
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == count
    until(lambda: not any(is_alive(pid) for pid in pids))
    assert not done.stderr


def test_silence_is_what_the_reader_saw_and_no_pause_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heard = Report()
    silence = Silence(heard)

    def look(passed_s: float) -> float:
        now[0] += passed_s
        return silence.look()

    assert [look(0.5), look(0.5), look(0.25)] == [0.0, 0.5, 0.75], "nothing was heard before the first look"
    assert look(3600.0) == 0.75 + LONGEST_GAP_S, "the reader was suspended"
    heard.beat()
    assert [look(0.5), look(0.5)] == [0.0, 0.5]
    now[0] += 3600.0
    silence.begin()
    assert look(0.5) == 0.5


@pytest.mark.parametrize(("timeout_s", "after_s"), [(0.0, math.inf), (2.5, 2.5)])
def test_a_timeout_of_zero_means_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, after_s: float
) -> None:
    found: list[float] = []
    monkeypatch.setattr(supervision, "ActorGroup", lambda *_, timeout_s, **further: found.append(timeout_s))
    supervisor = supervision.Supervisor(tmp_path, serial=False, say=print)
    supervisor.launch_actors(
        [], [], WeightSyncQueue(1), timeout_s=timeout_s, shared_warnings=SharedWarnings(), notices=NO_NOTICES
    )
    assert found == [after_s]
