"""Start and end of a program: its streams, Ctrl-C during imports, and readable errors.

Nothing here loads torch, so that a generated program can begin before its own imports, which take seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from pearl.actors.waiting import start_waiting
from pearl.error_place import described
from pearl.errors import PearlError
from pearl.lingering_threads import watch_lingering
from pearl.process_limits import check_address_space, limit_reached
from pearl.runtime.beginning import INTERRUPTED, end_at_once
from pearl.runtime.recomposition import RecompositionDueError, compose_again
from pearl.standard_streams import keep_standard_streams

DEBUG_VARIABLE = "PEARL_DEBUG"  # set and not empty: errors come with their traceback

_WITHOUT_ACTORS = {"--serial", "--help", "-h"}  # options of programs that start no process

logger = logging.getLogger("pearl.runtime")


_has_begun = False


def is_program() -> bool:
    """Whether this process runs a generated program."""
    return _has_begun


def begin_program(actors: int = 0) -> None:
    """Call before the slow imports: until `run_program`, Ctrl-C ends the process with one line.

    So does an import that a limit of the process makes fail. Exits where the limits leave no room for torch.

    No garbage is collected until then: importing torch makes a million objects, none of them garbage. Interpreters for
    `actors` processes start at once, to import what these need while the host imports.
    """
    global _has_begun
    _has_begun = True
    gc.disable()
    atexit.register(gc.freeze)  # Python's last collection would look at all of them, which takes 0.4 s
    keep_standard_streams()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _tell_limit
    try:
        check_address_space()
    except PearlError as error:
        sys.exit(_failed(str(error)))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    if actors and not _WITHOUT_ACTORS & set(sys.argv):
        with contextlib.suppress(OSError):  # a limit of processes: the run will say so when it starts them
            start_waiting(actors)


def run_program(main: Callable[[], int]) -> None:
    """Run a program's `main` and exit with its code; an error becomes one message, and exit code 1.

    The traceback goes to the run's log, and with PEARL_DEBUG=1 to standard error.
    """
    keep_standard_streams()
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():  # since `begin_program`
        gc.freeze()  # no later collection looks at what was imported
        gc.enable()
    request = None
    try:
        code = main()
    except RecompositionDueError as due:
        code, request = 0, due.request
    except KeyboardInterrupt as error:
        print("Interrupted.", file=sys.stderr)
        number = error.args[0] if error.args else None  # of the signal, from `Interruption`
        code = 128 + number if isinstance(number, int) else INTERRUPTED
    except PearlError as error:
        code = _failed(str(error))
    except Exception as error:
        log, limit = run_log_file(), limit_reached(error)
        if limit is not None:
            code = _failed(limit)
        elif log is None:
            raise
        else:
            code = _failed(f"{described(error)}. The full traceback is in {log}.")
    if request is not None:
        compose_again(request)
    # Only Python's own shutdown is left: let Ctrl-C end it at once.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    watch_lingering(_name_lingering)
    sys.exit(code)


def run_log_file() -> str | None:
    """The file that the `pearl` logger writes to; None where the run has not begun."""
    from pearl.runtime.run_log import run_file_handler

    handler = run_file_handler()
    return None if handler is None else str(handler.path)


def _failed(message: str) -> int:
    logger.debug("stopped", exc_info=True)
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print(f"Error: {message}", file=sys.stderr)
    return 1


def _name_lingering(names: list[str]) -> None:
    print(
        f"The run is over. Python waits for what an environment or a callback started: {', '.join(names)}. "
        "Ctrl-C ends the wait.",
        file=sys.stderr,
        flush=True,
    )


def _tell_limit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    limit = limit_reached(error) if isinstance(error, Exception) else None
    if limit is None or os.environ.get(DEBUG_VARIABLE):
        sys.__excepthook__(kind, error, trace)
    if limit is not None:
        print(f"Error: {limit}", file=sys.stderr)
