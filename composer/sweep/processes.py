"""Programs that a sweep starts: watched while they run, and ended when the sweep is to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_POLL_S = 0.2
_LONGEST_SAVING_S = 60.0  # a program that was asked to stop writes a checkpoint
_TAIL_BYTES = 20_000


class TrialFailedError(Exception):
    """A program of a trial ended without a score; the message says why."""


class SweepStoppedError(Exception):
    """The sweep was asked to stop while a program ran."""


class Processes:
    """Starts programs and waits for them, in any thread. `should_stop` says that the user asked the sweep to stop."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, command: Sequence[str], log: Path, look: Callable[[], None] = lambda: None) -> None:
        """Run `command` to its end, its output in `log`; `look` is called several times a second.

        An error of `look` ends the program at once. Raises SweepStoppedError, after the program has saved and stopped,
        and TrialFailedError if it fails.
        """
        with log.open("ab") as output:
            # A session of its own: Ctrl-C of the terminal reaches the sweep alone, which then asks the program to stop.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        with self._lock:
            self._running.add(process)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_POLL_S)
                    break
                if self._should_stop():
                    self._end_gently(process)
                    raise SweepStoppedError
                look()
        finally:
            _kill(process)
            with self._lock:
                self._running.discard(process)
        if self._should_stop() and code:
            raise SweepStoppedError
        if code:
            raise TrialFailedError(_last_words(log, code))

    def kill(self) -> None:
        """End all programs at once."""
        with self._lock:
            running = list(self._running)
        for process in running:
            _kill(process)

    @staticmethod
    def _end_gently(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LONGEST_SAVING_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(log: Path, code: int) -> str:
    """The error that the output ends with, in one line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    error = next((line for line in reversed(lines) if line.startswith("Error:")), lines[-1] if lines else "no output")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{error.removeprefix('Error: ')[:400]} ({how}; {log})"
