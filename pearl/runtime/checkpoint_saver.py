"""Saves checkpoints, and tries again after temporary failures: a full disk, a slow network, a held lock."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pearl.errors import CheckpointError, CheckpointWriteError
from pearl.runtime.checkpoint import latest_checkpoint

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
LAST_PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # at the end of the run, between one try and the next
HURRIED_PAUSES_S = (1.0, 2.0)  # after a signal to stop: the next one may be SIGKILL

_log = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves into `directory` with `write`, which takes the folder.

    During the run, a checkpoint that cannot be written is a warning, and is tried again later, without limit. At the
    end of the run it is an error. A state that can never be stored raises CheckpointError at once.
    """

    def __init__(self, directory: Path, write: Callable[[Path], Path]) -> None:
        self._directory, self._write = directory, write
        self._pause_s = 0.0  # after the last failure; 0 where the last checkpoint could be written
        self._again_at = math.inf

    def is_due(self, scheduled: bool) -> bool:
        """Whether to save now: when `scheduled`, or after a failure when the pause is over."""
        return time.monotonic() >= self._again_at if self._pause_s else scheduled

    def save(self) -> Path | None:
        """Save during the run; None, with a warning, if that fails now."""
        try:
            path = self._write(self._directory)
        except CheckpointWriteError as error:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._again_at = time.monotonic() + self._pause_s
            _log.warning("%s It is tried again in %.0f s; training goes on. %s", error, self._pause_s, self.good())
            return None
        if self._pause_s:
            _log.warning("The checkpoint could be written again: %s.", path)
        self._pause_s, self._again_at = 0.0, math.inf
        return path

    def save_last(self, *, hurried: bool = False) -> Path:
        """Save at the end of the run: retry for some seconds (fewer if `hurried`), then save in a temporary folder.

        Raises CheckpointError, which says where the last good one is, if the checkpoint is not in its directory.
        """
        for pause in (*(HURRIED_PAUSES_S if hurried else LAST_PAUSES_S), None):
            try:
                return self._write(self._directory)
            except CheckpointWriteError as error:
                if pause is None:
                    raise self._given_up(error) from error
                _log.warning("%s It is tried again in %.0f s.", error, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _given_up(self, error: CheckpointWriteError) -> CheckpointError:
        try:
            folder = Path(tempfile.mkdtemp(prefix="pearl-checkpoint-"))
            try:
                refuge = self._write(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                raise
        except (CheckpointError, OSError) as second:
            _log.warning("Nor could it be written elsewhere: %s", second)
            return CheckpointError(f"{error} {self.good()}")
        return CheckpointError(
            f"{error} It was written to {refuge} instead: move it into {self._directory}, and --resume goes on from it."
        )

    def good(self) -> str:
        """Where the last checkpoint is that can be resumed, in words."""
        last = latest_checkpoint(self._directory)
        return "There is no earlier checkpoint." if last is None else f"The last good checkpoint is {last}."
