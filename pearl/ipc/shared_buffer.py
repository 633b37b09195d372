"""Memory shared by processes, which the system frees when the last of them ends in any way."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any


class SharedBuffer:
    """`nbytes` of zeroed memory, inherited by a spawned process to which it is passed as an argument.

    It is an unnamed file in memory (memfd), not a named segment: nothing remains after a SIGKILL, and the size of
    /dev/shm, which is small in containers, does not limit it.
    """

    def __init__(self, nbytes: int, *, _fd: int | None = None) -> None:
        self.nbytes = nbytes
        self._fd = self._create(nbytes) if _fd is None else _fd
        self.memory = mmap.mmap(self._fd, nbytes)

    @staticmethod
    def _create(nbytes: int) -> int:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("pearl")
        else:
            fd, name = tempfile.mkstemp(prefix="pearl-")
            os.unlink(name)  # noqa: PTH108  (the open descriptor keeps it alive)
        os.ftruncate(fd, nbytes)
        return fd

    @property
    def descriptor(self) -> int:
        """The open file of the memory, for a process that is being started; it belongs to this object."""
        return self._fd

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError("A SharedBuffer can only be passed to a process that is being spawned.")
        return _attach, (self.nbytes, reduction.DupFd(self._fd))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The mapping outlives the descriptor; it ends with its last view. When the interpreter ends, the module's names
        # may be gone before its objects.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)


def _attach(nbytes: int, descriptor: Any) -> SharedBuffer:
    return SharedBuffer(nbytes, _fd=descriptor.detach())
