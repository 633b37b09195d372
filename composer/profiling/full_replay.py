"""Makes a full Replay Manager and a full Data Storage to profile, in the same way as a program makes them."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pearl.backends.protocol import Factory
from pearl.replay.synthetic import FillableStorage, random_priorities
from pearl.runtime.data_storage import HostDataStorage, make_storage
from pearl.spec import OBS, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

_FILL_ROWS = 4096

# Fields of ReplaySpec that no measurement depends on, each with the reason. Calibration keys contain all others.
TIMELESS = {"beta_final": "a replay is profiled as at the start of a run, where beta has its first value"}


def replay_parameters(
    spec: ReplaySpec, fanout: int, n_step: int, workers: int = 1
) -> dict[str, bool | int | float | str]:
    """Everything that a measurement of the replay depends on, as part of a calibration key."""
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in TIMELESS}
    values |= {
        "fanout": fanout,
        "n_step": n_step,
        "workers": workers,
    }  # n steps make n chains of shared next observations
    return {name: value if type(value) in (bool, int, float, str) else repr(value) for name, value in values.items()}


class AnyStorage(FillableStorage, Protocol):
    """A Data Storage in any memory."""

    def gather(self, indices: np.ndarray, out: Any = None) -> Mapping[str, Any]:
        """The rows at `indices`."""


class FullReplay:
    """The full Replay Manager `manager` of `spec`, made by `factory`.

    With a limit on how often items may be sampled, training without insertions would exhaust them: `renew` rewrites
    slots to replace exhausted items.
    """

    def __init__(self, spec: ReplaySpec, fanout: int, factory: Factory, workers: int = 1) -> None:
        self.spec = dataclasses.replace(spec, fanout=fanout)
        self.rng = np.random.default_rng(0)
        self.manager = factory.with_workers(workers).make_replay(self.spec, seed=0)
        self.beta = self.spec.first_beta
        self._next = 0
        for start in range(0, spec.capacity, _FILL_ROWS):
            self._write(np.arange(start, min(start + _FILL_ROWS, spec.capacity)))

    def batches(self, batch_size: int, most: int) -> int:
        """How many batches may be drawn between two calls of `renew`, at least 1 and at most `most`."""
        limit = self.spec.max_times_sampled
        return most if limit == 0 else min(most, max(1, self.spec.capacity * limit // (2 * batch_size)))

    def renew(self, samples: int) -> None:
        """Rewrite, in turn, twice as many slots as `samples` samples may have exhausted."""
        if limit := self.spec.max_times_sampled:
            # Twice as many: slots are rewritten whether exhausted or not, and half of all samples always remain.
            rows = min(self.spec.capacity, math.ceil(2 * samples / limit))
            slots = np.arange(self._next, self._next + rows) % self.spec.capacity
            self._next = (self._next + rows) % self.spec.capacity
            self._write(slots)

    def _write(self, slots: np.ndarray) -> None:
        self.manager.insert(slots, random_priorities(len(slots), self.rng))


def host_storage(
    transition: TransitionSpec, replay: ReplaySpec, actors: ActorSpec, train: TrainSpec
) -> HostDataStorage:
    """An empty Data Storage in the host's memory or in a deleted file, as a program makes it."""
    with tempfile.TemporaryDirectory(prefix="pearl-profile-") as folder:
        return make_storage(transition, replay, actors, train, Path(folder))


def fill(storage: AnyStorage, columns: dict[str, np.ndarray]) -> None:
    """Write every slot of the storage, with `columns` repeated as often as needed."""
    rows = len(columns[OBS])
    for start in range(0, storage.capacity, rows):
        storage.insert(columns, min(rows, storage.capacity - start))


def steps(columns: dict[str, np.ndarray], rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Consecutive parts of `rows` rows of the columns, repeated for ever."""
    parts = [{n: c[k : k + rows] for n, c in columns.items()} for k in range(0, len(columns[OBS]), rows)]
    while True:
        yield from parts
