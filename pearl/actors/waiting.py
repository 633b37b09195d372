"""Interpreters that start while the host still imports, and then wait for the work of an actor.

An actor's own imports take about as long as the host's: so they run at the same time, on another core.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

HOSTS_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # a terminal sends them to every process

_MOST_DESCRIPTORS = 250  # that one message may carry
_MESSAGE_BYTES = 65_536
_waiting: list[WaitingInterpreter] = []


class WaitingInterpreter:
    """A new interpreter, which imports what an actor needs and then waits for `begin`.

    It ends with the host. SIGINT and SIGHUP are blocked there.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = multiprocessing.spawn.get_command_line()
        call = f"wait({theirs.fileno()}, {os.getpid()})"
        program = f"import sys; sys.path[:] = {sys.path!r}; from pearl.actors.waiting import wait; {call}"
        flags[flags.index("-c") + 1] = program
        allowed = signal.pthread_sigmask(signal.SIG_BLOCK, HOSTS_SIGNALS)
        try:
            self.process = subprocess.Popen(flags, pass_fds=(theirs.fileno(),))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
            theirs.close()

    def begin(self, payload: int, tracker: int, descriptors: Sequence[int]) -> bool:
        """Let it do what `multiprocessing.spawn.spawn_main` would, with `descriptors`; False if it has ended."""
        if self.process.poll() is not None or len(descriptors) > _MOST_DESCRIPTORS:
            return False
        work = {"payload": payload, "tracker": tracker, "descriptors": list(descriptors)}
        with contextlib.closing(self._socket):
            try:
                socket.send_fds(self._socket, [json.dumps(work).encode()], list(descriptors))
            except OSError:
                return False
        return True

    def end(self) -> None:
        """End it."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


def start_waiting(count: int) -> None:
    """Start so many interpreters for the actors to come."""
    _waiting.extend(WaitingInterpreter() for _ in range(count))


def take_waiting() -> WaitingInterpreter | None:
    """One of those that wait, if there is any."""
    return _waiting.pop(0) if _waiting else None


def end_waiting() -> None:
    """End those that nobody has taken."""
    while _waiting:
        _waiting.pop().end()


@contextlib.contextmanager
def ending_waiting() -> Iterator[None]:
    """End those that nobody has taken inside."""
    try:
        yield
    finally:
        end_waiting()


def wait(descriptor: int, host: int) -> None:
    """Import what an actor needs, and do the work that comes from the process `host`; called in the new interpreter."""
    from pearl import _native

    _native.end_with_parent(host)
    import pearl.actors.process
    import pearl.runtime.queues  # noqa: F401

    with socket.socket(fileno=descriptor) as connection:
        message, received, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
    if not message:  # the host has ended, or needs no more actors
        os._exit(0)
    work = json.loads(message)
    numbers = work["descriptors"]
    apart = [_outside(set(numbers), found) for found in received]
    for found, number in zip(apart, numbers, strict=True):
        os.dup2(found, number)
        os.close(found)
    multiprocessing.spawn.spawn_main(pipe_handle=work["payload"], tracker_fd=work["tracker"])


def _outside(numbers: set[int], descriptor: int) -> int:
    """`descriptor`, or a copy of it whose number is not in `numbers`: the descriptors there are about to be replaced.

    Copies get the lowest free number: a limit of open files (ulimit -n) may allow no high ones.
    """
    while descriptor in numbers:
        descriptor = os.dup(descriptor)
    return descriptor
