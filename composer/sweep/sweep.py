"""Runs the trials of a sweep, several at a time, until all are done or the user stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.spec_overrides import short_text
from composer.sweep.processes import Processes, SweepStoppedError, TrialFailedError
from composer.sweep.spec import SweepSpec
from composer.sweep.study import PrunedTrialError, Study, shown_number
from composer.sweep.trial import TrialRuns
from pearl.runtime.interruption import Interruption
from pearl.runtime.run_lock import RunLock

if TYPE_CHECKING:
    import optuna

_POLL_S = 0.2


def run_sweep(spec: SweepSpec, folder: Path, trials: int, jobs: int, say: Callable[[str], None]) -> tuple[Study, int]:
    """Run until `folder` holds `trials` trials that have ended, `jobs` at a time; the study and an exit code.

    The code is 0, or 128 + the signal that stopped the sweep; then programs have saved and stopped, and the next call
    goes on with them. A second signal ends them at once, and raises KeyboardInterrupt. Raises FolderHeldError if
    another sweep works in the folder, and as `Study` does.
    """
    lock = RunLock(folder, "--folder")
    try:
        study = Study(spec, folder)
        with Interruption() as interruption:
            work = _Work(spec, study, folder, max(0, trials - study.finished), say, lambda: bool(interruption.signal))
            work.run(jobs)
            return study, interruption.exit_code
    finally:
        lock.release()


@dataclass
class _Work:
    """What the threads of a sweep share. `left` trials are still to begin."""

    spec: SweepSpec
    study: Study
    folder: Path
    left: int
    say: Callable[[str], None]
    signalled: Callable[[], bool]
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    composing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.processes = Processes(self.should_stop)

    def should_stop(self) -> bool:
        """Whether the user, or a thread that failed, ends the sweep."""
        return self.signalled() or self.error is not None

    def run(self, jobs: int) -> None:
        """Work in `jobs` threads, and wait for them."""
        threads = [threading.Thread(target=self._work, name=f"sweep-{number}") for number in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            said = False
            while any(thread.is_alive() for thread in threads):
                time.sleep(_POLL_S)
                if self.signalled() and not said:
                    said = True
                    self.say("Stopping: programs save and end; Ctrl-C again ends them at once.")
        except BaseException as error:
            self.error = error
            self.processes.kill()
            raise
        finally:
            for thread in threads:
                thread.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            while True:
                with self.lock:
                    if not self.left or self.should_stop():
                        return
                    self.left -= 1
                    trial, values, name = self.study.ask()
                self._try(trial, values, self.folder / name)
        except BaseException as error:
            self.error = self.error or error

    def _try(self, trial: optuna.Trial, values: dict[str, Any], folder: Path) -> None:
        began = time.monotonic()
        shown = ", ".join(f"{name.partition('.')[2]} = {short_text(value)}" for name, value in values.items())
        number = shown_number(trial)
        self.say(f"Trial {number} {'begins' if number == trial.number else 'goes on'}: {shown}")
        runs = TrialRuns(
            *(self.spec, values, folder, self.processes),
            lambda step, value: self.study.report(trial, step, value),
            self.should_stop,
        )
        try:
            with self.composing:  # one at a time: measurements would disturb each other
                runs.compose()
            scores = runs.scores()
        except SweepStoppedError:
            return  # the next sweep continues it
        except PrunedTrialError:
            self.study.prune(trial, time.monotonic() - began)
            runs.remove_checkpoints()
            self.say(f"Trial {number} pruned: behind the median of the others")
        except (TrialFailedError, OSError) as error:
            self.study.fail(trial, str(error), time.monotonic() - began)
            self.say(f"Trial {number} failed: {error}")
        else:
            objective = self.study.complete(trial, scores, time.monotonic() - began)
            self.say(f"Trial {number}: {self.spec.objective} {objective:,.4g} of {len(scores)} seeds")
