"""How much is trained for how much is collected."""

from __future__ import annotations

import math

from pearl.runtime.run_state import Counters
from pearl.spec import TrainSpec

_UNLIMITED = 1 << 30


class ReplayRatio:
    """Keeps samples trained per transition collected at `train.replay_ratio`, from both sides.

    Training waits for data, collection waits for training. `lead_rows` is how many transitions may be collected and not
    yet stored: collection may lead by these and one batch's worth, so that one of the two can always go on. An
    infinite ratio lets both run free.
    """

    def __init__(self, train: TrainSpec, counters: Counters, lead_rows: int) -> None:
        self._ratio = train.replay_ratio
        self._batch = train.batch_size
        self._starts = max(train.learning_starts, train.batch_size)
        # When collection has to wait, even what is stored, up to `lead_rows` fewer, suffices for a batch.
        self._lead = lead_rows + math.ceil(train.batch_size / train.replay_ratio)
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
        """Whether more transitions may be collected now."""
        if self._counters.collected < self._starts or math.isinf(self._ratio):
            return True
        return self._credit(self._counters.collected) <= self._ratio * self._lead

    @property
    def achieved(self) -> float:
        """Samples trained per transition stored since learning started."""
        return self._counters.samples / max(1, self._counters.stored - self._starts)
