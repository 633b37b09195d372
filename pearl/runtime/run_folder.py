"""The folders of a run: locked against other runs, and made again if someone moves or deletes them."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from pearl.errors import ConfigurationError, FolderHeldError
from pearl.runtime.options import Options
from pearl.runtime.run_lock import RunLock

_log = logging.getLogger(__name__)


def _real(folder: Path) -> Path:
    return Path(os.path.realpath(folder))  # Path.resolve raises for links that lead to themselves


class RunFolder:
    """Holds the folders of the run and of its checkpoints until `release`.

    Raises ConfigurationError, with nothing written, if another run holds one, or if one cannot be written.
    """

    def __init__(self, options: Options) -> None:
        folders = {_real(options.run_dir): "--run-dir"}
        folders.setdefault(_real(options.checkpoint_dir), "--checkpoint-dir")
        self._locks: list[RunLock] = []
        self._errors: dict[Path, ConfigurationError] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(self.release)
            for folder, option in folders.items():
                self._locks.append(RunLock(folder, option))
            stack.pop_all()

    def error(self, folder: Path) -> ConfigurationError | None:
        """Why the run must not write into its `folder`, as `keep` last found; None if it may."""
        return self._errors.get(_real(folder))

    def is_lost(self, folder: Path) -> bool:
        """Whether another run has taken `folder`, after it was moved or deleted: it stays lost."""
        return isinstance(self.error(folder), FolderHeldError)

    def keep(self) -> bool:
        """Make folders again that were moved or deleted; True, with a warning, if any changed hands or came back.

        A folder that cannot be made now (a full disk, a network that fails) is tried again at the next call.
        """
        changed = [self._keep(lock) for lock in self._locks]
        return any(changed)

    def _keep(self, lock: RunLock) -> bool:
        earlier = self._errors.get(lock.folder)
        if isinstance(earlier, FolderHeldError):
            return False
        try:
            renewed = lock.renew()
        except ConfigurationError as error:
            self._errors[lock.folder] = error
            if isinstance(error, FolderHeldError):
                text = "was moved or deleted, and another run began there. This run goes on without it"
            else:
                text = "cannot be used now. The run goes on, and tries again every second"
            if type(error) is not type(earlier):
                _log.warning("The folder %s %s. %s", lock.folder, text, error)
            return isinstance(error, FolderHeldError)
        self._errors.pop(lock.folder, None)
        if renewed:
            _log.warning(
                "The folder %s was moved or deleted. The run goes on, in a new folder of that name.", lock.folder
            )
        elif earlier is not None:
            _log.warning("The folder %s can be used again.", lock.folder)
        return renewed or earlier is not None

    def release(self) -> None:
        """Let go of the folders; may be called twice."""
        for lock in self._locks:
            lock.release()
