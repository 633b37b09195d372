"""How much is trained for how much is collected."""

from __future__ import annotations

import math

from pearl.runtime.run_state import Counters
from pearl.spec import TrainSpec

_UNLIMITED = 1 << 30


class ReplayRatio:
    """Keeps samples trained per transition collected at `train.replay_ratio`, from both sides.

    Training waits for data, collection waits for training; each may lead by `lead_rows` transitions, so that neither
    waits for the other's last message. An infinite ratio lets both run free.
    """

    def __init__(self, train: TrainSpec, counters: Counters, lead_rows: int) -> None:
        self._ratio = train.replay_ratio
        self._batch = train.batch_size
        self._starts = max(train.learning_starts, train.batch_size)
        self._lead = max(lead_rows, math.ceil(2 * train.batch_size / train.replay_ratio))
        self._counters = counters

    def _credit(self, transitions: int) -> float:
        """Samples that may be trained for `transitions`, less those trained."""
        return self._ratio * max(0, transitions - self._starts) - self._counters.samples

    def batches_allowed(self) -> int:
        """Batches that may be trained now; large if the ratio is infinite."""
        if self._counters.stored < self._starts:
            return 0
        if math.isinf(self._ratio):
            return _UNLIMITED
        return max(0, int(self._credit(self._counters.stored) // self._batch))

    def collection_allowed(self) -> bool:
        """May more transitions be collected now?"""
        if self._counters.collected < self._starts or math.isinf(self._ratio):
            return True
        return self._credit(self._counters.collected) <= self._ratio * self._lead

    @property
    def achieved(self) -> float:
        """Samples trained per transition stored since learning started."""
        return self._counters.samples / max(1, self._counters.stored - self._starts)
