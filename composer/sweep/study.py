"""The study of a sweep: Optuna's, in an SQLite file, so that a sweep that was ended goes on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.sweep.spec import SweepSpec
from pearl.errors import ConfigurationError, GenerationError
from pearl.extras import import_extra

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.db"
_NAME = "sweep"
_CONTINUES, _FOLDER, _IDENTITY, _REASON, _SCORES, _SECONDS = (
    *("continues", "folder", "sweep", "reason"),
    *("scores", "seconds"),
)


class PrunedTrialError(Exception):
    """The pruner ended the trial: at this evaluation, most other trials were better."""


@dataclass(frozen=True)
class TrialRow:
    """A trial as the sweep's table shows it, under the number of its folder. `values` are by "table.key"."""

    number: int
    state: str
    objective: float | None
    scores: tuple[float, ...]
    seconds: float | None
    values: Mapping[str, Any]
    reason: str
    folder: str


class Study:
    """The trials of a sweep in `folder`; its methods may be called from several threads.

    Raises MissingExtraError without Optuna, and ConfigurationError if the folder holds a sweep of another spec, or
    trials of an unknown one. Any method raises GenerationError if the file cannot be read or written.
    """

    def __init__(self, spec: SweepSpec, folder: Path) -> None:
        self._optuna: Any = import_extra("optuna", "sweep", "A sweep")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._spec, self._lock = spec, threading.RLock()
        self._file = folder / STUDY_FILE
        self._study = self._open()
        self._continue_interrupted()

    def _open(self) -> optuna.Study:
        import sqlalchemy

        address = sqlalchemy.engine.URL.create("sqlite", database=str(self._file)).render_as_string()
        with self._quietly():
            try:
                storage = self._optuna.storages.RDBStorage(address, engine_kwargs={"connect_args": {"timeout": 60}})
                study: optuna.Study = self._optuna.create_study(
                    storage=storage, study_name=_NAME, direction="maximize", load_if_exists=True
                )
                before = study.user_attrs.get(_IDENTITY)
            except Exception as error:  # of Optuna, SQLAlchemy and SQLite
                raise ConfigurationError(
                    f"{self._file} cannot be opened as the study of a sweep: {_first_line(error)}. "
                    "Choose another folder with --folder, or remove this one."
                ) from error
            if before is None:
                if unknown := next(self._file.parent.glob("trial-*"), None):
                    raise ConfigurationError(
                        f"{unknown} is of a sweep that {self._file} knows nothing of: its runs would count for trials "
                        "with other settings. Choose another folder with --folder, or remove the trials in this one."
                    )
                study.set_user_attr(_IDENTITY, self._spec.identity)
            elif before != self._spec.identity:
                raise ConfigurationError(
                    f"{self._file.parent} holds a sweep of another specification than {self._spec.path} is now: its "
                    "trials cannot be compared with new ones. Choose another folder with --folder, or restore the file."
                )
            # Another seed with each start: with the same one, the first random trials would come again.
            study.sampler = self._optuna.samplers.TPESampler(
                seed=(self._spec.sampler_seed + len(study.trials)) % 2**32,
                n_startup_trials=max(1, self._spec.startup_trials),
                constant_liar=True,
            )
            warm = round(self._spec.warmup * self._spec.evaluations)
            study.pruner = (
                self._optuna.pruners.MedianPruner(self._spec.startup_trials, n_warmup_steps=warm)
                if self._spec.pruner == "median"
                else self._optuna.pruners.NopPruner()
            )
        return study

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        import sqlalchemy

        try:
            with self._lock, warnings.catch_warnings():
                warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                yield
        except (self._optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
            raise GenerationError(
                f"{self._file} cannot be read or written: {_first_line(error.__cause__ or error)}. It is kept; "
                "when the disk has room again and nothing else holds the file, the same command goes on."
            ) from error

    def _continue_interrupted(self) -> None:
        """Put interrupted trials to the front; the finished runs in their folders are kept."""
        with self._quietly():
            found = self._study.get_trials(deepcopy=False)
            continued = {trial.user_attrs.get(_CONTINUES) for trial in found}
            for trial in found:
                if trial.state == self._optuna.trial.TrialState.RUNNING:
                    if trial.number not in continued:
                        attributes = {_CONTINUES: trial.number, _FOLDER: folder_name(trial)}
                        self._study.enqueue_trial(trial.params, user_attrs=attributes)
                    self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)

    @property
    def finished(self) -> int:
        """How many trials have ended, with or without a score."""
        return sum(row.state != "interrupted" for row in self.rows())

    def ask(self) -> tuple[optuna.Trial, dict[str, Any], str]:
        """The next trial, its values and the name of its folder."""
        with self._quietly():
            trial = self._study.ask()
            return trial, {one.name: one.suggest(trial) for one in self._spec.space}, folder_name(trial)

    def report(self, trial: optuna.Trial, step: int, value: float) -> None:
        """An evaluation of a trial; raises PrunedTrialError if the trial is to end here."""
        with self._quietly():
            trial.report(value, step)
            if trial.should_prune():
                raise PrunedTrialError

    def complete(self, trial: optuna.Trial, scores: list[float], seconds: float) -> float:
        """Store the scores of a trial's seeds; returns the objective."""
        with self._quietly():
            objective = self._spec.together(scores)
            trial.set_user_attr(_SCORES, scores)
            trial.set_user_attr(_SECONDS, seconds)
            self._study.tell(trial, objective)
            return objective

    def prune(self, trial: optuna.Trial, seconds: float) -> None:
        """Store that the pruner ended the trial."""
        with self._quietly():
            trial.set_user_attr(_SECONDS, seconds)
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, trial: optuna.Trial, reason: str, seconds: float) -> None:
        """Store why a trial has no score."""
        with self._quietly():
            trial.set_user_attr(_REASON, reason[:1000])
            trial.set_user_attr(_SECONDS, seconds)
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def rows(self) -> list[TrialRow]:
        """All trials that have begun, without those that others continued."""
        with self._quietly():
            found = self._study.get_trials(deepcopy=False)
        continued = {trial.user_attrs.get(_CONTINUES) for trial in found}
        waiting = self._optuna.trial.TrialState.WAITING
        begun = (t for t in found if t.number not in continued and (t.state != waiting or _CONTINUES in t.user_attrs))
        return sorted(map(self._row, begun), key=lambda row: row.number)

    def _row(self, trial: optuna.trial.FrozenTrial) -> TrialRow:
        attributes, state = trial.user_attrs, trial.state.name.lower()
        names = {"fail": "failed", "running": "interrupted", "waiting": "interrupted"}
        fixed = trial.system_attrs.get("fixed_params", {})
        stored = {**fixed, **trial.params}
        return TrialRow(
            number=shown_number(trial),
            state=names.get(state, state),
            objective=trial.value if state in ("complete", "pruned") else None,
            scores=tuple(attributes.get(_SCORES, ())),
            seconds=attributes.get(_SECONDS),
            values={one.name: one.value(stored[one.name]) for one in self._spec.space if one.name in stored},
            reason=str(attributes.get(_REASON, "")),
            folder=folder_name(trial),
        )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"


def shown_number(trial: optuna.Trial | optuna.trial.FrozenTrial) -> int:
    """The number of a trial, or of the first one that it continues: that of its folder."""
    return int(folder_name(trial).rpartition("-")[2])


def folder_name(trial: optuna.Trial | optuna.trial.FrozenTrial) -> str:
    """The folder of a trial: that of the trial that it continues, or one of its own."""
    return str(trial.user_attrs.get(_FOLDER, f"trial-{trial.number:04d}"))
