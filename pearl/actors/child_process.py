"""Processes that the host starts. Each ends with the host, however the host ends, and takes its own children along."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.context
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, Protocol

from pearl import _native
from pearl.actors.waiting import HOSTS_SIGNALS, take_waiting
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.lingering_threads import watch_lingering
from pearl.standard_streams import keep_standard_streams

_PROGRAM = ("init_main_from_name", "init_main_from_path")
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0005, 0.01
_LONGEST_DEATH_S = 5.0  # a broken driver may keep a killed process alive
_LONGEST_PARTING_S = 1.0


class Process(Protocol):
    """The host's handle of a process, on this machine or another; see `ChildProcess`."""

    name: str

    @property
    def pid(self) -> int:
        """Process id, where it runs."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""

    @property
    def cause_of_death(self) -> str:
        """How it ended."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it has not in time."""


class ChildProcess:
    """Runs `target(*args)` in an interpreter of its own, a new one or one that waits for work.

    SIGINT and SIGHUP are blocked there: the host handles them. `args` are pickled as `multiprocessing` does, and may
    contain queues. With `without_program`, the process does not import the program.

    Not a `multiprocessing.Process`, for three reasons: a daemonic one may not start children, as some environments do;
    the host waits at exit for one that is not daemonic; and children of either hold open the pipe that signals its
    death. This process leads a process group, which is killed with it.
    """

    def __init__(
        self, target: Callable[..., None], args: tuple[object, ...], name: str, *, without_program: bool = False
    ) -> None:
        self.name = name
        tracker = multiprocessing.resource_tracker.getfd()
        assert tracker is not None  # it was started
        launch = _Launch([tracker])
        payload = launch.pickled(target, args, name, without_program=without_program)
        # A file in memory, not a pipe: a process that never reads cannot block the host.
        file = SharedBuffer(len(payload))
        file.memory[:] = payload
        pipe_handle = launch.duplicate(file)
        waiting = take_waiting()
        if waiting is not None and waiting.begin(pipe_handle, tracker, launch.descriptors):
            self._process = waiting.process
            return
        command = multiprocessing.spawn.get_command_line(tracker_fd=tracker, pipe_handle=pipe_handle)
        # The new process inherits the block: otherwise a signal could end it before it leads its own group.
        allowed = signal.pthread_sigmask(signal.SIG_BLOCK, HOSTS_SIGNALS)
        try:
            self._process = subprocess.Popen(command, pass_fds=launch.descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, allowed)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; the negative number of the signal that ended it, or its exit code.

        The rest of its process group is killed.
        """
        if self._process.returncode is None and self._has_ended():
            self._kill_group()  # before the process is reaped, while its id is still taken
            self._process.wait()
        return self._process.returncode

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # already reaped elsewhere
            return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False if it has not in time."""
        deadline, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        while self.exit_code is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(poll_s, left_s))
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        return True

    def kill(self) -> None:
        """End the process and its group at once."""
        if self.exit_code is None:
            self._kill_group()
            self._process.kill()  # it may not lead its group yet
            self.wait(_LONGEST_DEATH_S)

    @property
    def cause_of_death(self) -> str:
        """How the process ended: "signal SIGSEGV", "exit code 1"."""
        code = self.exit_code or 0
        return f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"


class DeathCount:
    """Counts processes that died within the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def one_more(self) -> int:
        """Count a death now; how many there were within the window, this one included."""
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        return len(self._deaths)


def signal_name(number: int) -> str:
    """The name of a signal; of a real-time signal its distance from the first one."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class _Launch:
    """Collects the descriptors that a new process inherits, as pickling asks for them."""

    def __init__(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors

    def pickled(
        self, target: Callable[..., None], args: tuple[object, ...], name: str, *, without_program: bool
    ) -> bytes:
        """What `multiprocessing.spawn.spawn_main` reads: how to prepare the process, and what it runs."""
        preparation = _preparation(name)
        program = {key: preparation.pop(key) for key in _PROGRAM if key in preparation}
        multiprocessing.context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            work = self._dumped((target, args))
            start = _Start(os.getpid(), {} if without_program else program, work)
            return self._dumped(preparation) + self._dumped(start)
        finally:
            multiprocessing.context.set_spawning_popen(None)

    @staticmethod
    def _dumped(value: object) -> bytes:
        file = io.BytesIO()
        reduction.dump(value, file)
        return file.getvalue()

    def duplicate_for_child(self, descriptor: int) -> int:
        """Asked by `reduction.DupFd`."""
        self.descriptors.append(descriptor)
        return descriptor

    def duplicate(self, buffer: SharedBuffer) -> int:
        """The descriptor of a buffer, for the new process."""
        return self.duplicate_for_child(buffer.descriptor)

    def DupFd(self, descriptor: int) -> _Inherited:  # noqa: N802  (multiprocessing's name)
        """Asked by `reduction.DupFd`."""
        return _Inherited(descriptor)


def _preparation(name: str) -> dict[str, Any]:
    """What `multiprocessing.spawn.prepare` reads in a process of this name."""
    program = sys.modules["__main__"]
    if not hasattr(program, "__spec__"):  # under pdb before Python 3.13; multiprocessing expects None for a script
        program.__spec__ = None
    try:
        return multiprocessing.spawn.get_preparation_data(name)
    except FileNotFoundError:  # the working folder was deleted, so it has no path to state; a child inherits it
        deleted = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.chdir("/")
            preparation = multiprocessing.spawn.get_preparation_data(name)
        finally:
            os.fchdir(deleted)
            os.close(deleted)
        del preparation["dir"]
        return preparation


@dataclass(frozen=True)
class _Inherited:
    """A descriptor that is open in the new process under the number that it has here."""

    descriptor: int

    def detach(self) -> int:
        """The descriptor; the caller now owns it."""
        return self.descriptor


class _Start:
    """What the new process runs instead of the process object of `multiprocessing`.

    `program` is how to import the host's program, `work` the pickled target and its arguments.
    """

    def __init__(self, host: int, program: Mapping[str, Any], work: bytes) -> None:
        self._state = host, program, work

    def __getstate__(self) -> tuple[int, Mapping[str, Any], bytes]:
        return self._state

    def __setstate__(self, state: tuple[int, dict[str, Any], bytes]) -> None:
        host, program, work = state
        os.setpgid(0, 0)
        for number in HOSTS_SIGNALS:  # blocked so far, and environments may unblock them
            signal.signal(number, signal.SIG_IGN)
        # Before the program imports torch, which takes seconds.
        _native.end_with_parent(host)
        keep_standard_streams()
        multiprocessing.spawn.prepare(program)
        self._target, self._args = pickle.loads(work)

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Called by `multiprocessing.spawn`; the exit code."""
        os.close(parent_sentinel)
        try:
            self._target(*self._args)
        except SystemExit:  # it failed: no thread of the environment may delay that
            _end_children()  # before the watch, which may end this process
            watch_lingering(_end_despite)
            raise
        finally:
            _end_children()
        return 0


def _end_children() -> None:
    """End children that Python would wait for before the process may end."""
    left = [child for child in multiprocessing.active_children() if not child.daemon]
    for child in left:
        child.terminate()
    deadline = time.monotonic() + _LONGEST_PARTING_S
    for child in left:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()


def _end_despite(threads: list[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the environment closed it
            stream.flush()
    os._exit(1)
