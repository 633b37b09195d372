"""Messages for errors caused by the shell or the container: which limit, its value, how to raise it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from pearl.errors import CapacityError

# Torch alone maps 0.7 GB; with less, it fails to load or crashes the process.
LEAST_ADDRESS_SPACE = 1_000_000_000
_FILES = ("too many open files",)
_THREADS = ("can't start new thread",)
# Messages of the dynamic loader, the kernel, C++ and torch.
_MEMORY = ("failed to map segment", "cannot create shared object", "bad_alloc", "allocate memory")
_HOME = ("could not determine home directory", "getpwuid()", "no username set in the environment")


def limit_reached(error: BaseException) -> str | None:
    """The message for the user if a limit of this process, or the lack of a folder, caused `error`; else None."""
    for cause in _chain(error):
        text = str(cause).lower()
        number = cause.errno if isinstance(cause, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE) or any(words in text for words in _FILES):
            return (
                f"Too many files are open: this process may have {_limit(resource.RLIMIT_NOFILE)} at once (ulimit -n). "
                "Raise the limit in the shell that starts it: ulimit -n 1024."
            )
        if number == errno.EFBIG and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return (
                f"A file, or memory that processes share, may have {_limit(resource.RLIMIT_FSIZE)} bytes in this "
                f"process (ulimit -f), which are too few ({_said(cause)}). Raise the limit in the shell that starts "
                "it: ulimit -f unlimited."
            )
        if any(words in text for words in _THREADS):
            return (
                f"No further thread or process can be started ({_said(cause)}). The user may have "
                f"{_limit(resource.RLIMIT_NPROC)} (ulimit -u), and this process {_memory_limit()}. Raise these limits, "
                "or those of the container, or end other processes."
            )
        if isinstance(cause, MemoryError) or number == errno.ENOMEM or any(words in text for words in _MEMORY):
            return (
                f"Memory is short ({_said(cause)}): this process may have {_memory_limit()}. Raise the limit in the "
                "shell that starts it (ulimit -v unlimited), raise the container's, or lower the size of the replay."
            )
        if any(words in text for words in _HOME):
            return no_home()
        if number == errno.ENOENT and _working_folder_is_gone():
            return (
                "The working folder was deleted, so paths that begin there name nothing. Change to a folder that "
                'exists; if it was made again, cd "$PWD" does.'
            )
    return None


def check_address_space() -> None:
    """Raise CapacityError if this process may map less memory than torch needs to load."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise CapacityError(
            f"This process may map {limit / 1e6:,.0f} MB of memory (ulimit -v); loading torch takes at least "
            f"{LEAST_ADDRESS_SPACE / 1e6:,.0f} MB. Raise the limit in the shell that starts it: ulimit -v unlimited."
        )


def no_home() -> str:
    """The message for a user without a home folder."""
    return (
        f"No home folder is known: HOME is not set, and the user id {os.getuid()} has no entry in the password file. "
        "Set HOME to a folder that you can write, or set PEARL_CACHE_DIR and USER."
    )


def _working_folder_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _memory_limit() -> str:
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return f"{min(finite) / 1e6:,.0f} MB of memory (ulimit -v, -d)" if finite else "all memory that is free"


def _limit(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    return "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
