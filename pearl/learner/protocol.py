"""The Learner's contract, equal for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np


class StepResult(NamedTuple):
    """What one training step returns: new priorities `(batch,)` float32, their mean absolute TD error, all metrics."""

    priorities: np.ndarray
    td_error: float
    metrics: Mapping[str, float]


class Learner(Protocol):
    """One stochastic-gradient step on a batch: FP, LOSS, BP, GA, weight update.

    `prepare` is called once from the thread that will call `step`; all else from that thread only, except
    `write_weights` and `load_weights` while no step runs.
    """

    backend: str
    device: str

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot that actors need."""

    def prepare(self) -> None:
        """Set up the calling thread (core count, streams)."""

    def step(self, batch: Mapping[str, np.ndarray], weights: np.ndarray) -> StepResult:
        """Train on columns of `(batch, *shape)` with importance weights `(batch,)` float32."""

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""

    def load_weights(self, weights: np.ndarray) -> None:
        """Take a policy snapshot `(weight_count,)` float32, as `write_weights` gives; TrainerError for another size."""
