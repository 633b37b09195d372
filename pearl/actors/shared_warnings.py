"""Shows a warning once per run, although each process would show it."""

from __future__ import annotations

import fcntl
import hashlib
import warnings
from typing import TextIO

import numpy as np

from pearl.ipc.shared_buffer import SharedBuffer

_MOST = 1023  # every process shows further ones


class SharedWarnings:
    """The warnings already shown, shared with each process that receives this object.

    Python shows a warning once for each line of code, but in each process, and again after any change of the filters.
    """

    def __init__(self) -> None:
        self.__setstate__(SharedBuffer(8 * (1 + _MOST)))

    def __getstate__(self) -> SharedBuffer:
        return self._buffer

    def __setstate__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._count = np.frombuffer(buffer.memory, np.uint64, 1)
        self._digests = np.frombuffer(buffer.memory, np.uint64, _MOST, 8)

    def install(self) -> None:
        """Make `warnings` show only new ones, until `uninstall`."""
        self._earlier = warnings.showwarning
        warnings.showwarning = self._show

    def uninstall(self) -> None:
        """Undo `install`, unless something else replaced it since."""
        if warnings.showwarning == self._show:
            warnings.showwarning = self._earlier

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if self.is_new(f"{category.__name__}: {message}"):
            self._earlier(message, category, filename, lineno, file, line)

    def is_new(self, text: str) -> bool:
        """Whether no process has asked for this `text` before."""
        digest = np.frombuffer(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), np.uint64)[0]
        fcntl.lockf(self._buffer.descriptor, fcntl.LOCK_EX)
        try:
            count = int(self._count[0])
            if (self._digests[:count] == digest).any():
                return False
            if count < _MOST:
                self._digests[count] = digest
                self._count[0] = count + 1
            return True
        finally:
            fcntl.lockf(self._buffer.descriptor, fcntl.LOCK_UN)
