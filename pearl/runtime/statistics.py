"""The statistics of a run's observations and returns: of all actors together, published to them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pearl.algorithms.trainer import Trainer
from pearl.ipc.queues import WeightSyncQueue
from pearl.moments import Moments
from pearl.spec import TransitionSpec


class RunStatistics:
    """Merges the statistics in the actors' messages into those of `trainer`, and publishes the result to the actors.

    Only the host's main thread uses it. `snapshot` is what the actors read; its numbers are the float64 vectors of
    `pearl.moments`, in the order of `transition.statistics`, as pairs of float32.
    """

    def __init__(self, transition: TransitionSpec, trainer: Trainer) -> None:
        self._trainer = trainer
        self._moments = {f.name: Moments(trainer.statistics_shape(f.name)) for f in transition.statistics}
        for name, moments in self._moments.items():
            moments.merge(trainer.read_statistics(name))
        self.snapshot = WeightSyncQueue(2 * sum(len(moments.flat) for moments in self._moments.values()))
        self._publish()

    def _publish(self) -> None:
        self.snapshot.write(np.concatenate([moments.flat for moments in self._moments.values()]).view(np.float32))

    def collected(self, message: Mapping[str, np.ndarray]) -> None:
        """Merge a message's statistics, which are under the names of `transition.statistics`."""
        for name, moments in self._moments.items():
            moments.merge(message[name])
            self._trainer.write_statistics(name, moments.flat)
        self._publish()
