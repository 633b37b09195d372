"""Training on rollouts in PyTorch: any on-policy trainer, in the minibatches that every other device would take."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pearl import _native
from pearl.algorithms.on_policy import Minibatch, OnPolicyTrainer
from pearl.errors import TrainerError
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import least_step_us
from pearl.learner.trainer_learner import TrainerRolloutLearner


class TorchRolloutLearner(TrainerRolloutLearner):
    """Trains `trainer` by its own `update_minibatch`, on the device of its networks.

    `threads` is torch's intra-operator parallelism on the CPU.
    """

    backend = "torch"

    def __init__(self, trainer: object, *, epochs: int, batch_size: int, threads: int = 1) -> None:
        if not isinstance(trainer, OnPolicyTrainer):
            raise TrainerError(f"Rollouts cannot train {self.supports(trainer)}. Derive from pearl.algorithms.PPO.")
        super().__init__(trainer, epochs, batch_size, threads)
        _native.keep_freed_memory()
        self.device = str(trainer.device)

    least_step_us = staticmethod(least_step_us)

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if it can train `trainer`; else one line that says what it does not support."""
        if isinstance(trainer, OnPolicyTrainer):
            return None
        return f"{type(trainer).__name__}, which is not an on-policy trainer"

    def prepare(self) -> None:
        """Set this thread's core count."""
        torch.set_num_threads(self.threads)

    def train(self, rollout: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> Mapping[str, float]:
        """Train on the columns of a rollout; the result has what `update_minibatch` returns, averaged.

        Raises TrainerError if a part of the loss is not finite; the step on it was made.
        """
        columns = [torch.from_numpy(column).to(self.device) for column in self.columns_of(rollout)]
        obs, action, log_prob, advantage, ret, *masks = columns
        obs = obs.reshape(len(obs), *self.trainer.input_shape)
        whole = Minibatch(obs, action, log_prob, ret - advantage, advantage, ret, *masks)
        rows = np.arange(len(ret)) if rows is None else rows
        if not len(rows):
            raise TrainerError("Training needs at least one row; found none.")
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        steps = epochs = 0
        goes_on = True
        while goes_on and epochs < self.epochs:
            order = rows[_native.shuffled(len(rows), self.seed, self.trainer.gradient_steps)]
            epochs += 1
            on_device = torch.from_numpy(order).to(self.device)
            for first in range(0, len(order), self.batch_size):
                picked = on_device[first : first + self.batch_size]
                parts, goes_on = self.trainer.update_minibatch(whole.rows(picked))
                _require_finite(parts)
                for name, part in parts.items():
                    sums[name] = sums.get(name, 0.0) + part
                    counts[name] = counts.get(name, 0) + 1
                if not goes_on:
                    break
                steps += 1
        means = {name: total / counts[name] for name, total in sums.items()}
        return {**means, "minibatches": float(steps), "epochs": float(epochs)}


def _require_finite(parts: Mapping[str, float]) -> None:
    wrong = [f"{name} is {part}" for name, part in parts.items() if not math.isfinite(part)]
    if wrong:
        raise TrainerError(
            f"The training step diverged: {', '.join(wrong)}. Look at the rollout for NaN or huge observations and "
            "rewards; a smaller learning rate or max_grad_norm may help. Do not use these weights: --resume continues "
            "from the last checkpoint."
        )
