"""The collection buffer: transitions wait here until they may enter the Data Storage (paper, Sec. IV-C1)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import OBSERVATION_STATISTICS, RETURN_STATISTICS, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

_INSERTION_ROWS = 128  # larger insertions cost the same per row
_INSERTION_STEPS = 16  # of all environments, so that few environments do not wait for many rows


def insertion_rows(replay: ReplaySpec, actors: ActorSpec, train: TrainSpec, message_rows: int) -> int:
    """Least transitions of an insertion, where messages have up to `message_rows`."""
    wanted = train.insertion_rows or min(_INSERTION_ROWS, _INSERTION_STEPS * actors.env_count)
    return min(wanted, replay.capacity - message_rows)


class Ring(Protocol):
    """The part of a Data Storage that collision checks need."""

    @property
    def cursor(self) -> int:
        """The next slot to be written."""

    @property
    def capacity(self) -> int:
        """All slots."""


class CollectionBuffer:
    """Collects DCQ messages; `full` when another might not fit.

    `rows` is how many transitions an insertion brings at least, `message_rows` the largest message.
    """

    def __init__(self, transition: TransitionSpec, rows: int, message_rows: int) -> None:
        self._columns = transition.empty(rows + message_rows)
        if transition.priority is not None:
            self._columns["priority"] = np.empty(rows + message_rows, np.float32)
        self._priorities: np.ndarray | None = None
        self._threshold = rows
        self._since = 0.0
        self.count = 0

    @property
    def full(self) -> bool:
        """Enough has been collected for an insertion."""
        return self.count >= self._threshold

    @property
    def age_s(self) -> float:
        """Seconds that the oldest transition has waited."""
        return time.monotonic() - self._since if self.count else 0.0

    def take(self, dcq: DataCollectionQueue) -> Mapping[str, np.ndarray] | None:
        """Copy the queue's oldest message in, if there is one; returns it (valid until the next take) for counting."""
        found = dcq.peek()
        if found is None:
            return None
        message, rows = found
        if not self.count:
            self._since = time.monotonic()
        end = self.count + rows
        for name, column in self._columns.items():
            column[self.count : end] = message[name][:rows]
        self.count = end
        summary = summary_of(message, rows)
        dcq.release()
        return summary

    def take_all(self) -> dict[str, np.ndarray]:
        """The collected columns, as views, for the Data Storage; the buffer is empty afterwards."""
        count, self.count = self.count, 0
        taken = {name: column[:count] for name, column in self._columns.items()}
        self._priorities = taken.pop("priority", None)
        return taken

    @property
    def priorities(self) -> np.ndarray | None:
        """First priorities of the rows that `take_all` returned last; None where the Replay Manager gives them."""
        return self._priorities


def summary_of(message: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Copies of a DCQ message's other fields; it has `rows` transitions."""
    return {
        "episode_return": message["episode_return"][: message["counts"][0]].copy(),
        "episode_length": message["episode_length"][: message["counts"][0]].copy(),
        "env_steps": message["counts"][1:2].copy(),
        "actor": message["counts"][2:3].copy(),
        "policy_version": message["counts"][3:4].copy(),
        "rows": np.array([rows]),
        "span": message["span"].copy(),
        **{name: message[name].copy() for name in (OBSERVATION_STATISTICS, RETURN_STATISTICS) if name in message},
    }


def collides(storage: Ring, rows: int, batches: Iterable[np.ndarray]) -> bool:
    """Whether inserting `rows` transitions would overwrite a slot of a sampled batch still being trained on."""
    return any(bool(((indices - storage.cursor) % storage.capacity < rows).any()) for indices in batches)
