"""The common base of Learners of a torch trainer: the snapshot of its policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Generic, TypeVar

import numpy as np

from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import (
    Trainer,
    concatenated,
    load_concatenated,
    modules_of,
    policy_arrays,
    policy_tensors,
)
from pearl.errors import ConfigurationError, TrainerError
from pearl.lazy_torch import torch
from pearl.learner.protocol import Learner, RolloutLearner
from pearl.rollout.columns import VALUE
from pearl.spec import ACTION_MASK

T = TypeVar("T")
C = TypeVar("C", bound=Sized)

_COLUMNS = ("obs", "action", "log_prob", "advantage", "ret")


class _OfTrainer(Generic[T]):
    """Holds `trainer`, whose policy tensors must not be replaced meanwhile, unless its Learner follows it."""

    def __init__(self, trainer: T) -> None:
        self.trainer = trainer
        # In arrays if the trainer's networks are: these stay the weights when torch comes to them.
        self._arrays = policy_arrays(trainer)
        self._policy = policy_tensors(trainer) if self._arrays is None else []
        self._modules = modules_of(trainer) if self._arrays is None else {}

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot."""
        return sum(map(len, self._arrays)) if self._arrays is not None else sum(t.numel() for t in self._policy)

    def _follow_trainer(self) -> None:
        """Take the policy's tensors that the trainer has now: its own code may have replaced networks.

        Raises TrainerError if their size has changed, or if what the optimizers train is no longer in the trainer.
        """
        if self._arrays is not None:
            return
        expected, self._policy = self.weight_count, policy_tensors(self.trainer)
        before, self._modules = self._modules, modules_of(self.trainer)
        name = type(self.trainer).__name__
        if self.weight_count != expected:
            raise TrainerError(
                f"{name} replaced its networks while it trained: the policy now has {self.weight_count:,} weights, and "
                f"had {expected:,}. Actors take the networks of the start: keep the sizes of the layers."
            )
        replaced = self._modules != before
        if replaced and isinstance(self.trainer, Trainer) and (left := self.trainer.left_networks()):
            raise TrainerError(
                f"{name} replaced networks while it trained: {left} still trains the parameters of the old ones. Copy "
                "values into the network that is there (self.q.load_state_dict(other.state_dict())), or call "
                "self.build(), which makes all networks and optimizers again."
            )

    def policy_memory(self) -> list[np.ndarray]:
        """The arrays of the policy snapshot, flat and in place; only for weights on the CPU."""
        return [t.detach().numpy().reshape(-1) for t in self._policy] if self._arrays is None else self._arrays

    def prepare(self) -> None:
        """Nothing to set up in the calling thread."""

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""
        if self._arrays is not None:
            np.concatenate(self._arrays, out=out)
            return
        target = torch.from_numpy(out)
        if all(tensor.device.type == "cpu" for tensor in self._policy):
            concatenated(self._policy, out=target)
        else:
            target.copy_(concatenated(self._policy))

    def load_weights(self, weights: np.ndarray) -> None:
        """Load a policy snapshot `(weight_count,)` float32."""
        if self._arrays is None:
            load_concatenated(weights, self._policy)
            return
        if weights.shape != (self.weight_count,):
            raise TrainerError(f"A snapshot of these weights has shape ({self.weight_count},); found {weights.shape}.")
        offset = 0
        for array in self._arrays:
            array[...] = weights[offset : offset + len(array)]
            offset += len(array)


def require_numbers(weights: np.ndarray) -> None:
    """Raise TrainerError for a policy snapshot with NaN. Infinite numbers may be a network's own, as in masks."""
    if math.isnan(weights.min(initial=0.0)):  # a minimum with any NaN is NaN
        raise TrainerError(
            f"The training diverged: {int(np.isnan(weights).sum()):,} of the policy's {len(weights):,} weights are "
            "NaN. Look at the loss for divisions by 0, roots and logarithms, and at the batches for huge numbers; a "
            "smaller learning rate or max_grad_norm may help. Do not use these weights: --resume continues from the "
            "last checkpoint."
        )


class TrainerLearner(_OfTrainer[T], Learner, Generic[T]):
    """The Learner of `trainer`; the policy's tensors must not be replaced while it lives."""

    def columns_of(self, batch: Mapping[str, C], names: Sequence[str]) -> list[C]:
        """The columns of a batch in the order of `names`; TrainerError if some are missing, or there are no rows."""
        try:
            columns = [batch[name] for name in names]
        except KeyError:
            missing = ", ".join(name for name in names if name not in batch)
            raise TrainerError(
                f"{type(self.trainer).__name__} trains on batches with the columns {', '.join(names)}; missing: "
                f"{missing}."
            ) from None
        if not len(columns[0]):
            raise TrainerError("A batch needs at least one transition; found none.")
        return columns


class TrainerRolloutLearner(_OfTrainer[OnPolicyTrainer], RolloutLearner):
    """The RolloutLearner of `trainer`: `epochs` times over each rollout, in minibatches of `batch_size` rows."""

    def __init__(self, trainer: OnPolicyTrainer, epochs: int, batch_size: int, threads: int) -> None:
        if epochs < 1 or batch_size < 1 or threads < 1:
            raise ConfigurationError(
                f"epochs, batch_size and threads must be at least 1; found {epochs}, {batch_size} and {threads}."
            )
        super().__init__(trainer)
        self.epochs = epochs
        self.batch_size = batch_size
        self.threads = threads
        self.seed = trainer.seed % 2**64  # of the minibatches' order; the kernels take it unsigned
        self._shapes = {"obs": trainer.input_shape, "action": tuple(trainer.action_space.shape or ())}
        self._shapes[ACTION_MASK] = (trainer.distribution.outputs,)

    def columns_of(self, rollout: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The columns in the order of the contract; TrainerError names one that is missing or does not fit."""
        names = (*_COLUMNS, ACTION_MASK) if self.trainer.action_masks else _COLUMNS
        missing = [name for name in names if name not in rollout]
        if missing:
            raise TrainerError(f"A rollout has the columns {', '.join(names)}; missing: {', '.join(missing)}.")
        rows = len(rollout["ret"])
        for name in (*names, *({VALUE} & rollout.keys())):
            shape, found = (rows, *self._shapes.get(name, ())), rollout[name].shape
            if found[:1] != (rows,) or math.prod(found) != math.prod(shape):
                raise TrainerError(f"Column {name!r} of a rollout of {rows} rows has shape {shape}; found {found}.")
        return [rollout[name] for name in names]
