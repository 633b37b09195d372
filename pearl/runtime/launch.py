"""Runs a generated program from another one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pearl.errors import ConfigurationError
from pearl.runtime.interruption import stop_signals


def run_generated(program: str | Path, options: Sequence[str] = ()) -> int:
    """Run `program` with its `options` in a Python of its own and return its exit code; 128 + n if signal n ended it.

    Ctrl-C reaches the program, which saves and stops; this process waits for it.
    """
    if not Path(program).is_file():
        raise ConfigurationError(f"There is no program {program}. `pearl compose SPEC.toml` writes one.")
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(number)

    # A terminal sends Ctrl-C to the child too, which takes two in one second for one; others may send it here only.
    earlier = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        child = subprocess.Popen([sys.executable, str(program), *options])
        code = child.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
