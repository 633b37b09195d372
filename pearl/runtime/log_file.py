"""Files that a run appends to; a file that cannot be written is one warning, and the run continues."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


class LogFile:
    """Appends to `path`; a new file begins with `header`. Used from one thread; opened by the first `append`.

    The file's folder must exist, or is made if `makes_folder`, but never the folder that this one lies in.
    Each piece is handed to the system at once and as a whole: one that does not fit the disk leaves no part behind.
    The first failure is a warning that names the file; every later `append` tries again.
    """

    def __init__(self, path: Path, header: bytes = b"", *, makes_folder: bool = False) -> None:
        self.path = Path(path)
        self.header = header
        self._makes_folder = makes_folder
        self._descriptor = -1
        self._size = 0
        self._lost = 0

    def append(self, piece: bytes) -> None:
        """Add `piece` to the end of the file."""
        try:
            if self._descriptor < 0:
                self._open()
            self._write(piece)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                _log.warning("%s cannot be written: %s. The run goes on without it.", self.path, error)
        else:
            if self._lost:
                lost, self._lost = self._lost, 0
                _log.warning("%s is written again; %d entries are missing.", self.path, lost)

    def close(self) -> None:
        """Close the file; a later `append` opens what is at its path by then."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # some network file systems report a full disk only here
                os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        if self._makes_folder:
            self.path.parent.mkdir(exist_ok=True)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._descriptor).st_size
        if not self._size:
            try:
                self._write(self.header)
            except OSError:
                self.close()  # the next try begins with the header again
                raise

    def _write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(piece)
