"""The common base of Learners of a torch trainer: the snapshot of its policy."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch

from pearl.algorithms.trainer import concatenated, load_concatenated, policy_tensors
from pearl.learner.protocol import Learner

T = TypeVar("T")


class TrainerLearner(Learner, Generic[T]):
    """The Learner of `trainer`; the policy's tensors must not be replaced while it lives."""

    def __init__(self, trainer: T) -> None:
        self.trainer = trainer
        self._policy = policy_tensors(trainer)

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot."""
        return sum(tensor.numel() for tensor in self._policy)

    def prepare(self) -> None:
        """Nothing to set up in the calling thread."""

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""
        target = torch.from_numpy(out)
        if all(tensor.device.type == "cpu" for tensor in self._policy):
            concatenated(self._policy, out=target)
        else:
            target.copy_(concatenated(self._policy))

    def load_weights(self, weights: np.ndarray) -> None:
        """Load a policy snapshot `(weight_count,)` float32."""
        load_concatenated(weights, self._policy)
