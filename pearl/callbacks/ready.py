"""Ready callbacks: stop at a return, keep the best policy, record videos, a metric of the user's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.callbacks.protocol import Callback, RunContext
from pearl.errors import ConfigurationError, PolicyError
from pearl.extras import require_extra

if TYPE_CHECKING:
    from pearl.runtime.evaluation import Evaluation

logger = logging.getLogger("pearl.runtime")

PROGRESS = "progress"  # the kind of the short evaluations during training


def check_text(name: str, value: object, what: str) -> None:
    """Raise ConfigurationError unless `value` is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be {what}, a text; found {value!r}.")


def _check_steps(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigurationError(f"{name} must be a whole number of environment steps, at least 1; found {value!r}.")


def _keep_earlier(path: Path) -> None:
    """Rename what an earlier run left at `path`."""
    if path.exists():
        from pearl.runtime.backup import put_aside

        logger.warning("%s of an earlier run was renamed to %s.", path, put_aside(path).name)


@dataclass
class StopAtReturn(Callback):
    """Ends the run when the mean return of `evaluations` short evaluations in a row is at least `mean_return`.

    The program's own --until-return also confirms the goal by a full evaluation; this needs none.
    """

    mean_return: float
    evaluations: int = 1
    _reached: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        is_number = isinstance(self.mean_return, int | float) and not isinstance(self.mean_return, bool)
        if not is_number or math.isnan(self.mean_return):
            raise ConfigurationError(f"StopAtReturn needs a mean return, a number; found {self.mean_return!r}.")
        if type(self.evaluations) is not int or self.evaluations < 1:
            raise ConfigurationError(
                f"StopAtReturn needs a count of evaluations, at least 1; found {self.evaluations!r}."
            )

    def on_start(self, run: RunContext) -> None:
        """Forget an earlier run of the process."""
        if not run.env_steps:
            self._reached = 0

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        """Count."""
        if kind != PROGRESS:
            return
        self._reached = self._reached + 1 if evaluation.mean >= self.mean_return else 0
        if self._reached >= self.evaluations:
            run.stop(f"a mean return of {evaluation.mean:.6g} reached {self.mean_return:g} (StopAtReturn)")

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._reached = int(state["reached"])


@dataclass
class KeepBest(Callback):
    """Writes the policy of the best short evaluation so far into `file`, as soon as there is one.

    The file, relative to the run folder, is one that `pearl.load_policy` reads. Without this callback the best weights
    are in checkpoints during the run, and in `best_weights.safetensors` at its end. A resumed run goes on with the best
    of its checkpoint, unless it evaluates in another environment; a new one renames the file of an earlier run.
    """

    file: str = "best_policy.safetensors"
    _best: float = field(default=-math.inf, init=False, repr=False)
    _evaluated_in: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        check_text("KeepBest.file", self.file, "the name of a file")

    def on_start(self, run: RunContext) -> None:
        """Forget a best return of another run or environment."""
        if not run.env_steps:
            self._best = -math.inf
            _keep_earlier(run.run_dir / self.file)
        evaluated_in = str(run.config["evaluated_in"])
        if self._evaluated_in not in ("", evaluated_in):
            self._best = -math.inf
        self._evaluated_in = evaluated_in

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        """Write if better."""
        if kind != PROGRESS:
            return
        file = run.run_dir / self.file
        if not evaluation.mean > self._best and file.is_file():
            return
        from pearl.policy.export import export_policy

        try:
            export_policy(run.policy(), file, "safetensors")
        except PolicyError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            logger.warning("%s The run goes on, and the next better policy is tried again.", error)
            return
        self._best = evaluation.mean

    def state_dict(self) -> dict[str, Any]:
        """The best mean return, and in which environment."""
        return {"best": self._best, "evaluated_in": self._evaluated_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what is better."""
        self._best, self._evaluated_in = float(state["best"]), str(state.get("evaluated_in", ""))


@dataclass
class RecordVideo(Callback):
    """Records `episodes` greedy episodes about every `every_steps` environment steps (extra `video`).

    It records at the next evaluation or checkpoint, when nothing is under way; training waits meanwhile. The files are
    in `folder`, relative to the run folder, in a folder named after the step.
    """

    every_steps: int
    episodes: int = 1
    folder: str = "videos"
    _next: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_steps("RecordVideo.every_steps", self.every_steps)
        _check_steps("RecordVideo.episodes", self.episodes)
        check_text("RecordVideo.folder", self.folder, "the name of a folder")

    def on_start(self, run: RunContext) -> None:
        """Look for the extra and for pictures before anything is trained, and forget an earlier run of the process."""
        require_extra("moviepy", "video", "RecordVideo")
        from pearl.policy.playing import check_pictures

        check_pictures(run.policy())
        if not run.env_steps:
            self._next = 0

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        """Record if due."""
        if kind == PROGRESS:
            self._record(run)

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        """Record if due."""
        self._record(run)

    def _record(self, run: RunContext) -> None:
        if run.env_steps < (self._next or self.every_steps):
            return
        from pearl.policy.playing import watch_policy

        self._next = (run.env_steps // self.every_steps + 1) * self.every_steps
        folder = run.run_dir / self.folder / f"step-{run.env_steps:09d}"
        _keep_earlier(folder)
        for _ in watch_policy(run.policy(), episodes=self.episodes, video=folder):
            pass

    def state_dict(self) -> dict[str, Any]:
        """The step of the next record."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._next = int(state["next"])


@dataclass
class UserMetric(Callback):
    """Logs the number that `measure(run)` returns after each short evaluation, under `name`.

    It becomes a column of `progress.csv` and a curve in TensorBoard, and loggers send it.
    """

    name: str
    measure: Callable[[RunContext], float]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"UserMetric needs a name, a text; found {self.name!r}.")
        if not callable(self.measure):
            raise ConfigurationError(
                f"UserMetric needs measure, a function of the run that returns a number; found {self.measure!r}."
            )

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        """Measure."""
        if kind == PROGRESS:
            run.log(self.name, float(self.measure(run)))
