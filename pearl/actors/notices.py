"""What a run tells its Actors beside the weights: statistics of observations, and attributes of the environments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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

    `statistics` are those that `pearl.runtime.statistics` publishes; `attributes` are those of `attribute_queue`. A
    reader finds each change of an attribute once.
    """

    statistics: WeightSyncQueue | None = None
    attributes: WeightSyncQueue | None = None
    _found: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # changes by attribute

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
        return {} if words is None else self._changed(words)

    def tell(self, actor: VectorActor) -> None:
        """Pass on what is new, for the actor's next message."""
        statistics, attributes = self.poll()
        if statistics is not None:
            actor.load_statistics(statistics.view(np.float64))
        if attributes is not None:
            actor.set_env_attributes(self._changed(attributes))

    def _changed(self, words: np.ndarray) -> dict[str, Any]:
        """The attributes that were set since the last call: environments may have changed the others themselves."""
        numbers = words.view(np.uint32)
        published: dict[str, Any] = json.loads(numbers[1:].view(np.uint8)[: numbers[0]].tobytes())
        changes = {name: change for name, (change, _) in published.items()}
        changed = {name: value for name, (change, value) in published.items() if self._found.get(name) != change}
        self._found.update(changes)
        return changed


NO_NOTICES = Notices()


def attribute_queue() -> WeightSyncQueue:
    """A queue for `write_attributes`."""
    return WeightSyncQueue(MOST_ATTRIBUTE_BYTES // 4 + 1)


def attribute_text(values: Mapping[str, Any], changes: Mapping[str, int]) -> bytes:
    """What `write_attributes` publishes, at most `MOST_ATTRIBUTE_BYTES`."""
    return json.dumps({name: (changes[name], value) for name, value in values.items()}).encode()


def write_attributes(queue: WeightSyncQueue, values: Mapping[str, Any], changes: Mapping[str, int]) -> None:
    """Publish attributes by name, JSON values; `changes` has another number for each that is set, be it as before."""
    text = attribute_text(values, changes)
    words = np.zeros(queue.weight_count, np.uint32)
    words[0] = len(text)
    words[1:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    queue.write(words.view(np.float32))
