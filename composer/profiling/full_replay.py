"""The Replay Manager and the Data Storage that are profiled: made as a program makes them, and full."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pearl.backends.protocol import Factory
from pearl.replay import DataStorage
from pearl.runtime.data_storage import make_storage
from pearl.spec import NEXT_OBS, OBS, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

_FILL_ROWS = 4096

# Fields of ReplaySpec on which no measurement depends, each with the reason. All others are part of calibration keys.
TIMELESS = {"beta_final": "a replay is profiled as it is when a run begins, where beta has not moved yet"}


def replay_parameters(spec: ReplaySpec, fanout: int, n_step: int) -> dict[str, bool | int | float | str]:
    """What a measurement of the replay depends on, as part of a calibration key."""
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in TIMELESS}
    values |= {"fanout": fanout, "n_step": n_step}  # of n steps, as many chains of shared next observations
    return {name: value if type(value) in (bool, int, float, str) else repr(value) for name, value in values.items()}


class AnyStorage(Protocol):
    """A Data Storage, wherever it lies."""

    @property
    def capacity(self) -> int:
        """Rows that it holds."""

    def insert(self, columns: Mapping[str, np.ndarray], count: int | None = None) -> np.ndarray:
        """Store the first `count` rows; return their slots."""

    def gather(self, indices: np.ndarray, out: Any = None) -> Mapping[str, Any]:
        """The rows at `indices`."""


class FullReplay:
    """The Replay Manager `manager` of `spec` that `factory` makes, all of whose slots are written.

    Where items may be sampled so many times only, a run that trains without inserting would use them up: `renew`
    rewrites slots to make up for samples.
    """

    def __init__(self, spec: ReplaySpec, fanout: int, factory: Factory) -> None:
        self.spec = dataclasses.replace(spec, fanout=fanout)
        self.rng = np.random.default_rng(0)
        self.manager = factory.make_replay(self.spec, seed=0)
        self.beta = self.spec.first_beta
        self._next = 0
        for start in range(0, spec.capacity, _FILL_ROWS):
            self._write(np.arange(start, min(start + _FILL_ROWS, spec.capacity)))

    def batches(self, batch_size: int, most: int) -> int:
        """How many batches may be drawn between two calls of `renew`, at least 1 and at most `most`."""
        limit = self.spec.max_times_sampled
        return most if limit == 0 else min(most, max(1, self.spec.capacity * limit // (2 * batch_size)))

    def renew(self, samples: int) -> None:
        """Rewrite, in turn, twice as many slots as `samples` samples may have used up."""
        if limit := self.spec.max_times_sampled:
            # Twice: slots are rewritten in turn, used up or not, so that half of all samples are always left.
            rows = min(self.spec.capacity, math.ceil(2 * samples / limit))
            slots = np.arange(self._next, self._next + rows) % self.spec.capacity
            self._next = (self._next + rows) % self.spec.capacity
            self._write(slots)

    def _write(self, slots: np.ndarray) -> None:
        self.manager.insert(slots, self.rng.random(len(slots), np.float32) + 0.01)


def host_storage(transition: TransitionSpec, replay: ReplaySpec, actors: ActorSpec, train: TrainSpec) -> DataStorage:
    """The empty Data Storage that a program makes in the host's memory, or in a file without a name."""
    with tempfile.TemporaryDirectory(prefix="pearl-profile-") as folder:
        return make_storage(transition, replay, actors, train, Path(folder))


def fill(storage: AnyStorage, columns: dict[str, np.ndarray]) -> None:
    """Write every slot of the storage, with the rows of `columns` again and again."""
    rows = len(columns[OBS])
    for start in range(0, storage.capacity, rows):
        storage.insert(columns, min(rows, storage.capacity - start))


def fill_rows(streams: int, capacity: int) -> int:
    """How many rows to fill a storage with: whole steps of `streams` environments, two at least."""
    return min(capacity, streams * max(2, _FILL_ROWS // streams))


def chained(columns: dict[str, np.ndarray], streams: int) -> dict[str, np.ndarray]:
    """The rows, step after step of `streams` environments, with each next observation that of the following step.

    The last step leads to the first, so that the rows may come again and again.
    """
    obs = columns[OBS]
    whole = len(obs) // streams * streams
    columns[NEXT_OBS][:whole] = np.roll(obs[:whole], -streams, axis=0)
    return columns


def steps(columns: dict[str, np.ndarray], rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Parts of `rows` rows of the columns, one after the other, for ever."""
    parts = [{n: c[k : k + rows] for n, c in columns.items()} for k in range(0, len(columns[OBS]), rows)]
    while True:
        yield from parts
