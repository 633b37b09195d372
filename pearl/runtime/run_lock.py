"""One run per folder: a second run would move the logs and checkpoints of the first."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import time
from pathlib import Path

from pearl.errors import ConfigurationError, FolderHeldError

LOCK_FILE = ".lock"

_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_RECORD_LIMIT = 65_536  # bytes
_LONGEST_HOLDER = 500  # characters

_log = logging.getLogger(__name__)
_held: set[tuple[int, int]] = set()  # device and inode of this process's lock files


class RunLock:
    """Holds `folder` for this process, from construction to `release` or the end of the process.

    It is a POSIX record lock on a file in the folder. The system frees it when the process ends, and child processes do
    not inherit it. The file says who holds it. `option` is the program's option that chooses the folder. Raises
    FolderHeldError if another run holds the folder, and ConfigurationError if the folder cannot be made or written;
    then nothing was written.
    """

    def __init__(self, folder: Path, option: str = "--run-dir") -> None:
        self._folder, self._option = Path(folder), option
        self._path = self._folder / LOCK_FILE
        self._descriptor = self._acquire()

    @property
    def folder(self) -> Path:
        """The folder that is held."""
        return self._folder

    def renew(self) -> bool:
        """Hold the folder of this name again if it was moved or deleted; True if so.

        Raises as the constructor does: another run may hold the new folder. A folder that cannot be read stays held.
        """
        try:
            if self._descriptor >= 0 and self._is_current(self._descriptor):
                return False
        except OSError as error:
            raise self._unusable(error) from error
        self._drop()
        self._descriptor = self._acquire()
        return True

    def release(self) -> None:
        """Let go of the folder; may be called twice."""
        with contextlib.suppress(OSError):
            if self._descriptor >= 0 and self._is_current(self._descriptor):
                self._path.unlink()
        self._drop()

    def _drop(self) -> None:
        if self._descriptor >= 0:
            _held.discard(_identity(os.fstat(self._descriptor)))
            os.close(self._descriptor)
        self._descriptor = -1

    def _acquire(self) -> int:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                # Closing any descriptor of the file would free this process's lock on it.
                if self._path.exists() and _identity(self._path.stat()) in _held:
                    raise self._refusal("this process")
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                if self._take(descriptor):
                    return descriptor
                os.close(descriptor)  # a run that has just ended removed the file
        except OSError as error:
            raise self._unusable(error) from error

    def _take(self, descriptor: int) -> bool:
        """Lock the open file and write down who holds it; False if the file is no longer the folder's."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                raise self._refusal(_holder(self._path)) from None
            if error.errno not in _WITHOUT_LOCKS:
                os.close(descriptor)
                raise
            _log.warning("The file system of %s has no locks: two runs must not share a folder.", self._folder)
        if not self._is_current(descriptor):
            return False
        _held.add(_identity(os.fstat(descriptor)))
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the record
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _record().encode(), 0)
        return True

    def _is_current(self, descriptor: int) -> bool:
        try:
            return _identity(self._path.stat()) == _identity(os.fstat(descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"The folder {self._folder} cannot be written: {error}. Choose another with {self._option}."
        )

    def _refusal(self, holder: str) -> FolderHeldError:
        return FolderHeldError(
            f"The folder {self._folder} belongs to a run that goes on: {holder}. Wait until it ends, stop "
            f"it, or choose another folder for this run with {self._option}."
        )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _record() -> str:
    return json.dumps(
        {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join([sys.executable, *sys.argv]),
        }
    )


def _holder(path: Path) -> str:
    """Who wrote the record, in words; the record is only shown."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_RECORD_LIMIT))
        words = f"process {found['pid']} on {found['host']}, since {found['since']}, {found['command']}"
        return "".join(letter for letter in words if letter.isprintable())[:_LONGEST_HOLDER]
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that could not be named"
