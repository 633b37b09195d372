"""PPO's Learner in C++: all epochs and minibatches of a rollout in one call, without the GIL.

It updates the weights and the optimizer's state of torch in place, as `pearl.backends.cpu.learner` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pearl import _native
from pearl.algorithms.arrays import Array
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.update_rule import ClippedStep
from pearl.errors import TrainerError
from pearl.learner.native_optimizer import NativeOptimizer
from pearl.learner.native_plan import (
    PinnedWeights,
    UnsupportedError,
    kernel_column,
    offset_of,
    read_network,
    weights_of,
)
from pearl.learner.native_rules import known_clipped_step, require_cpu
from pearl.learner.trainer_learner import TrainerRolloutLearner
from pearl.moments import OBSERVATION_CLIP
from pearl.rollout.columns import VALUE
from pearl.spec import ACTION_MASK

_FLOAT, _INTEGER, _BYTE = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.uint8)


class NativeRolloutLearner(TrainerRolloutLearner):
    """Trains `trainer` with `threads` threads, each on a part of the minibatch.

    The steps are those of the trainer's own `update_minibatch`, except for the rounding of sums. With the same number
    of threads on one machine, they are reproducible to the bit. Raises TrainerError if `supports` gives a reason.
    """

    backend = "native"
    device = "cpu"

    def __init__(self, trainer: object, *, epochs: int, batch_size: int, threads: int = 1) -> None:
        try:
            parts = _read(trainer)
        except UnsupportedError as error:
            raise TrainerError(
                f"The native learner cannot train {type(trainer).__name__} (unsupported: {error}). "
                "Use pearl.learner.torch_rollout_learner.TorchRolloutLearner, which trains any on-policy trainer."
            ) from error
        super().__init__(parts.trainer, epochs, batch_size, threads)
        self._step, self._optimizer = parts.step, parts.optimizer
        self._weights = PinnedWeights(parts.step.parameters)
        distribution = parts.trainer.distribution
        self._action_dtype = _INTEGER if distribution.sizes else _FLOAT
        self._native = _native.PpoLearner(
            parts.policy,
            parts.value,
            weights_of(parts.step.parameters),
            distribution.sizes,
            distribution.size,
            parts.log_std,
            threads,
        )

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if the native learner can train `trainer`; else one line that says what it does not support."""
        try:
            _read(trainer)
        except UnsupportedError as error:
            return str(error)
        return None

    def train(self, rollout: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> Mapping[str, float]:
        """Train on the columns of a rollout; the result also has `gradient_norm` before clipping, if that is on.

        Raises TrainerError for columns of another shape or dtype, and for rows and actions out of range, before the
        first step; and if loss or gradients are not finite: then the steps before stay.
        """
        self._weights.require_in_place()
        self._optimizer.refresh()
        scalars = self._step.scalars()
        self._native.set(**scalars)
        obs, action, log_prob, advantage, ret, *masks = self.columns_of(rollout)
        found = self._native.train(
            self._normalized(kernel_column("obs", obs, _FLOAT)),
            kernel_column("action", action, self._action_dtype),
            kernel_column("log_prob", log_prob, _FLOAT),
            kernel_column("advantage", advantage, _FLOAT),
            kernel_column("ret", ret, _FLOAT),
            None if rows is None else kernel_column("rows", rows, _INTEGER),
            self.epochs,
            self.batch_size,
            self.seed,
            self._optimizer.native,
            self.trainer.step_count,
            kernel_column(ACTION_MASK, masks[0], _BYTE) if masks else None,
            kernel_column(VALUE, rollout[VALUE], _FLOAT) if VALUE in rollout else None,
        )
        if not scalars["max_grad_norm"] or not found["minibatches"]:
            del found["gradient_norm"]
        return found

    def _normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations as the networks take them, by the statistics of the rollouts before."""
        found = self.trainer.present_normalization()
        if found is None:
            return obs
        mean, scale = found
        inputs: np.ndarray = (obs.reshape(len(obs), *mean.shape) - mean) * scale
        np.clip(inputs, -OBSERVATION_CLIP, OBSERVATION_CLIP, out=inputs)
        return inputs


class _Parts(NamedTuple):
    trainer: OnPolicyTrainer
    step: ClippedStep
    policy: _native.Network
    value: _native.Network
    log_std: int | None
    optimizer: NativeOptimizer


def _read(trainer: object) -> _Parts:
    """What the kernels need of `trainer`; UnsupportedError says in one line what is not supported."""
    require_cpu(trainer)
    known, rule, step = known_clipped_step(trainer)
    flat, log_std = step.parameters, step.log_std
    actor, (critic,) = rule.actor, rule.critics
    assert actor is not None
    policy, value = (read_network(n.name, n.module, n.input_shape, flat) for n in (actor, critic))
    offset = None
    if log_std is not None:
        offset = offset_of("log_std", log_std, flat)
        if not isinstance(log_std, Array) and not log_std.requires_grad:
            raise UnsupportedError("log deviations that are frozen")
    return _Parts(known, step, policy, value, offset, NativeOptimizer("optimizer", step.optimizer, flat))
