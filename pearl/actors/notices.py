"""What a run tells its Actors beside the weights: statistics of observations, and attributes of the environments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.ipc.queues import WeightSyncQueue

if TYPE_CHECKING:
    from pearl.actors.actor import VectorActor

MOST_ATTRIBUTE_BYTES = 8192  # of all attributes, as JSON
Notice = tuple["np.ndarray | None", "np.ndarray | None"]


@dataclass(frozen=True)
class Notices:
    """Queues of the newest statistics and attributes, with one writer, in the host; None: there are none.

    `statistics` are those that `pearl.runtime.statistics` publishes; `attributes` are those of `attribute_queue`.
    """

    statistics: WeightSyncQueue | None = None
    attributes: WeightSyncQueue | None = None

    def reader(self) -> Notices:
        """Another reader in this process, which has read nothing yet."""
        return Notices(*(queue and queue.reader() for queue in (self.statistics, self.attributes)))

    @property
    def counts(self) -> tuple[int, int]:
        """The sizes of both, in words of 32 bits; 0 for none."""
        statistics, attributes = self.statistics, self.attributes
        return statistics.weight_count if statistics else 0, attributes.weight_count if attributes else 0

    @classmethod
    def of_counts(cls, counts: tuple[int, int]) -> Notices:
        """New queues of these sizes."""
        return cls(*(WeightSyncQueue(count) if count else None for count in counts))

    def poll(self) -> Notice:
        """What is newer than at the last call, valid until the next; None for what is not."""
        statistics, attributes = self.statistics, self.attributes
        return statistics.poll() if statistics else None, attributes.poll() if attributes else None

    def write(self, notice: Notice) -> None:
        """Publish what `poll` found elsewhere."""
        for queue, words in zip((self.statistics, self.attributes), notice, strict=True):
            if queue is not None and words is not None:
                queue.write(words)

    def newest_attributes(self) -> dict[str, Any]:
        """The attributes that an Actor begins with."""
        words = None if self.attributes is None else self.attributes.poll()
        return {} if words is None else _attributes_in(words)

    def tell(self, actor: VectorActor) -> None:
        """Pass on what is new, for the actor's next message."""
        statistics, attributes = self.poll()
        if statistics is not None:
            actor.load_statistics(statistics.view(np.float64))
        if attributes is not None:
            actor.set_env_attributes(_attributes_in(attributes))


NO_NOTICES = Notices()


def attribute_queue() -> WeightSyncQueue:
    """A queue for `write_attributes`."""
    return WeightSyncQueue(MOST_ATTRIBUTE_BYTES // 4 + 1)


def write_attributes(queue: WeightSyncQueue, values: Mapping[str, Any]) -> None:
    """Publish attributes by name, JSON values of at most `MOST_ATTRIBUTE_BYTES`."""
    text = json.dumps(values).encode()
    words = np.zeros(queue.weight_count, np.uint32)
    words[0] = len(text)
    words[1:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    queue.write(words.view(np.float32))


def _attributes_in(words: np.ndarray) -> dict[str, Any]:
    numbers = words.view(np.uint32)
    found: dict[str, Any] = json.loads(numbers[1:].view(np.uint8)[: numbers[0]].tobytes())
    return found
