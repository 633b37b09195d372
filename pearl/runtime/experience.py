"""A run's training data, as checkpoints and reports see it: a replay with its Data Storage, or rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from pearl.errors import CheckpointError, ReplayError
from pearl.replay.frames import FRAMES
from pearl.replay.protocol import ReplayManager
from pearl.replay.synthetic import FillableStorage
from pearl.rollout.preparation import RolloutPreparation
from pearl.runtime.checkpoint_files import refuse, saved_count
from pearl.runtime.data_storage import PER_CHAIN

Arrays: TypeAlias = "dict[str, np.ndarray]"
Scalars: TypeAlias = "dict[str, bool | int | float | str]"

_REPLAY, _STORAGE, _ROLLOUT = "replay/", "storage/", "rollout/"  # prefixes of arrays and scalars
_STORAGE_SCALARS = ("size", "cursor", "inserted")
_REPLAY_STATISTICS = (
    "filled",
    "samples_per_item",
    "exhausted",
    "age_mean",
    "age_max",
    "effective_sample_size",
    "max_priority",
    "stale",
    "saturated",
)


class Experience(Protocol):
    """A run's training data; nothing may change while it is saved."""

    def state(self) -> tuple[Arrays, Scalars]:
        """The arrays and scalars for a checkpoint."""

    def knows(self, kind: str, name: str) -> bool:
        """Whether `name` is one of its own among a checkpoint's "arrays" or "counters"."""

    def check(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """Raise CheckpointError if parts of the checkpoint in `where` contradict each other; load nothing."""

    def load(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """Restore the result of `state`; call `check` before."""

    def log_scalars(self) -> dict[str, float]:
        """Numbers for the run's log."""

    def summary(self) -> dict[str, object]:
        """Numbers for the run's summary."""


class HostStorage(FillableStorage, Protocol):
    """The part of a Data Storage that the host needs, wherever the data are."""

    @property
    def size(self) -> int:
        """Slots written so far."""
        ...

    @property
    def cursor(self) -> int:
        """The next slot to be written."""
        ...

    @property
    def inserted(self) -> int:
        """Transitions ever inserted."""
        ...

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """All columns, `(capacity, *shape)` each."""
        ...

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Take columns back."""


class ReplayExperience:
    """A Replay Manager with its Data Storage; `beta` returns the exponent of the newest importance weights."""

    def __init__(
        self, replay: ReplayManager, storage: HostStorage, beta: Callable[[], float] = lambda: float("nan")
    ) -> None:
        self.replay, self.storage, self._beta = replay, storage, beta

    def state(self) -> tuple[Arrays, Scalars]:
        """The Replay Manager's state, and the rows that are stored."""
        arrays: Arrays = {}
        scalars: Scalars = {}
        for key, value in self.replay.state_dict().items():
            if isinstance(value, np.ndarray):
                arrays[f"{_REPLAY}{key}"] = value
            else:
                scalars[f"{_REPLAY}{key}"] = value
        for name, column in self.storage.columns.items():
            arrays[f"{_STORAGE}{name}"] = column[: self.storage.size]
        scalars |= {f"{_STORAGE}{name}": getattr(self.storage, name) for name in _STORAGE_SCALARS}
        return arrays, scalars

    def knows(self, kind: str, name: str) -> bool:
        """Names of the Replay Manager's state, of the storage's counts, and of any of its columns."""
        if kind == "arrays" and name.startswith(_STORAGE):
            return True
        known = {f"{_STORAGE}{n}" for n in _STORAGE_SCALARS} | {f"{_REPLAY}{n}" for n in self.replay.state_dict()}
        return name in known

    def check(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """Counts are whole numbers, columns have as many rows, and as many slots are written."""
        check_replay(arrays, scalars, where)

    def load(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """The Replay Manager's state first, then the rows."""
        self.replay.load_state_dict(_saved_replay(arrays, scalars))
        place = {name: saved_count(scalars, f"{_STORAGE}{name}", where) for name in _STORAGE_SCALARS}
        try:
            self.storage.restore(part(arrays, _STORAGE), **place)
        except ReplayError as error:
            raise CheckpointError(
                f"The transitions of the checkpoint in {where} cannot be restored: {error}"
            ) from error

    def log_scalars(self) -> dict[str, float]:
        """The Replay Manager's statistics and exponents."""
        found = self.replay.statistics()
        scalars = {name: float(getattr(found, name)) for name in _REPLAY_STATISTICS}
        scalars |= {"alpha": self.replay.alpha, "beta": self._beta()}
        return {f"replay/{name}": value for name, value in scalars.items()}

    def summary(self) -> dict[str, object]:
        """Updates that came too late, and priorities that did not fit."""
        found = self.replay.statistics()
        return {
            "stale_updates": found.stale,
            "saturated_priorities": found.saturated,
            "priority_rescales": found.rescales,
            "priority_recoveries": found.recoveries,
        }


def check_replay(arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
    """Raise CheckpointError if rows, counts and priorities of a saved `ReplayExperience` contradict each other."""
    place = {name: saved_count(scalars, f"{_STORAGE}{name}", where) for name in _STORAGE_SCALARS}
    _check_rows(part(arrays, _STORAGE), _saved_replay(arrays, scalars), place["size"], where)


def _saved_replay(arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {**part(arrays, _REPLAY), **part(scalars, _REPLAY)}


class RolloutExperience:
    """Rollouts: they do not outlive a step, but the statistics that standardise rewards do.

    `most_lag` returns by how many updates a rollout's policy was behind at most when it was trained on.
    """

    def __init__(self, preparation: RolloutPreparation, most_lag: Callable[[], int]) -> None:
        self._preparation, self._most_lag = preparation, most_lag

    def state(self) -> tuple[Arrays, Scalars]:
        """The statistics."""
        found = self._preparation.state_dict()
        arrays = {f"{_ROLLOUT}{k}": v for k, v in found.items() if isinstance(v, np.ndarray)}
        return arrays, {f"{_ROLLOUT}{k}": v for k, v in found.items() if not isinstance(v, np.ndarray)}

    def knows(self, kind: str, name: str) -> bool:
        """Names of the statistics."""
        return name in {f"{_ROLLOUT}{key}" for key in self._preparation.state_dict()}

    def check(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """They have the names, types and shapes of this run's; counts and squares are at least 0."""
        found = {**part(arrays, _ROLLOUT), **part(scalars, _ROLLOUT)}
        for name, own in self._preparation.state_dict().items():
            value: Any = found.get(name)
            least = 0.0 if name.endswith("squares") else -math.inf
            if isinstance(own, np.ndarray):
                if not isinstance(value, np.ndarray) or value.shape != own.shape or not np.isfinite(value).all():
                    refuse(where, f"{_ROLLOUT}{name}", f"finite numbers of shape {own.shape}", value)
            elif type(own) is int:
                saved_count(scalars, f"{_ROLLOUT}{name}", where)
            elif type(value) is not float or not math.isfinite(value) or value < least:
                at_least = "" if math.isinf(least) else " of at least 0"
                refuse(where, f"{_ROLLOUT}{name}", f"a finite number{at_least}", value)

    def load(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """The statistics."""
        self._preparation.load_state_dict({**part(arrays, _ROLLOUT), **part(scalars, _ROLLOUT)})

    def log_scalars(self) -> dict[str, float]:
        """Mean and deviation of the rewards so far, and how many numbers the quantiser had to clip."""
        return {f"rollout/{name}": value for name, value in self._preparation.report().items()}

    def summary(self) -> dict[str, object]:
        """The same, the policy's lag, and the memory of a rollout."""
        found = {**self._preparation.report(), "policy_lag": self._most_lag()}
        return {"rollout": {**found, "memory": self._preparation.memory()}}


def _check_rows(columns: Mapping[str, Any], replay: Mapping[str, Any], size: int, where: Path) -> None:
    """Refuse columns whose length is not `size`, and a replay whose written slots are not the first `size`."""
    for name, column in columns.items():
        if name == FRAMES and column.ndim:
            continue  # as many as the stacks show
        expected = min(size, 1) if name in PER_CHAIN else size
        if column.ndim < 1 or len(column) != expected:
            refuse(where, f"{_STORAGE}{name}", f"{expected} rows, as storage/size says", column.shape)
    generations = replay.get("generations")
    written = np.flatnonzero(generations) if isinstance(generations, np.ndarray) else np.empty(0, np.int64)
    if not np.array_equal(written, np.arange(size)):
        refuse(where, "replay/generations", f"above 0 in the {size} slots that are stored, and there alone", written)


def part(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
