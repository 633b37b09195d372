"""The folders of a run: held against other runs, and made again where somebody moves or deletes them."""

from __future__ import annotations

import contextlib
import logging

from pearl.errors import ConfigurationError
from pearl.runtime.options import Options
from pearl.runtime.run_lock import RunLock

_log = logging.getLogger(__name__)


class RunFolder:
    """Holds the folders of the run and of its checkpoints until `release`.

    Raises ConfigurationError, with nothing written, if another run holds one, or if one cannot be written.
    """

    def __init__(self, options: Options) -> None:
        folders = {options.run_dir.resolve(): "--run-dir"}
        folders.setdefault(options.checkpoint_dir.resolve(), "--checkpoint-dir")
        self._locks: list[RunLock] = []
        self.lost = False  # to another run, which began after the folder was moved or deleted
        with contextlib.ExitStack() as stack:
            stack.callback(self.release)
            for folder, option in folders.items():
                self._locks.append(RunLock(folder, option))
            stack.pop_all()

    def keep(self) -> bool:
        """Make folders again that were moved or deleted, with a warning; True if there are any, or they were lost."""
        if self.lost:
            return False
        try:
            gone = [lock.folder for lock in self._locks if lock.renew()]
        except ConfigurationError as error:
            self.lost = True
            _log.warning("The run goes on without logs, for its folder was moved or deleted. %s", error)
            return True
        for folder in gone:
            _log.warning("The folder %s was moved or deleted. The run goes on, in a new folder of that name.", folder)
        return bool(gone)

    def release(self) -> None:
        """Let go of the folders; may be called twice."""
        for lock in self._locks:
            lock.release()
