"""Runs a generated program from another process, and gives the shell command for it."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pearl.errors import ConfigurationError
from pearl.runtime.interruption import stop_signals


def shown(path: Path) -> str:
    """The path relative to the current folder, if it is inside."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def run_command(program: Path) -> str:
    """The shell command that runs the program."""
    return f"python {shlex.quote(shown(program))}"


def run_generated(program: str | Path, options: Sequence[str] = ()) -> int:
    """Run `program` with its `options` in a Python of its own and return its exit code; 128 + n if signal n ended it.

    Ctrl-C reaches the program, which saves and stops; this process waits for it.
    """
    if not Path(program).is_file():
        raise ConfigurationError(f"There is no program {program}. `pearl compose SPEC.toml` writes one.")
    if Path(program).suffix == ".toml":
        raise ConfigurationError(
            f"{program} is a composition file. `pearl compose {shlex.quote(str(program))}` writes its program."
        )
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(number)

    # A terminal also sends Ctrl-C to the child, which counts two within a second as one; other senders may not.
    earlier = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        child = subprocess.Popen([sys.executable, str(program), *options])
        code = child.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
