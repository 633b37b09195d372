"""A policy in torch: any trainer's own `get_action`."""

from __future__ import annotations

import numpy as np

from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import SamplesActions, TrainerLike, set_evaluation_mode
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import load_policy_weights


class TorchPolicy:
    """Acts as `trainer` does, whose modules it puts into evaluation mode."""

    def __init__(self, trainer: TrainerLike) -> None:
        self.trainer = trainer
        self.exploration = getattr(trainer, "exploration", None)
        set_evaluation_mode(trainer)

    def load_weights(self, weights: np.ndarray) -> None:
        """Copy a policy snapshot `(weight_count,)` float32 into the trainer's own modules."""
        load_policy_weights(self.trainer, weights)

    def act(self, obs: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions `(envs, *action)` for observations `(envs, *obs)`, float32 or bytes.

        With `masks` `(envs, choices)` bool, of those that they allow.
        """
        with torch.inference_mode():
            return self.trainer.get_action(torch.from_numpy(obs), *_as_tensors(masks)).numpy()

    def sample(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions like those of `act`, drawn by standard normal `noise` `(envs, *action)` float32."""
        assert isinstance(self.trainer, SamplesActions)
        with torch.inference_mode():
            return self.trainer.sample_action(torch.from_numpy(obs), torch.from_numpy(noise)).numpy()

    def explore(
        self, obs: np.ndarray, noise: np.ndarray, masks: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions `(envs, *action)` drawn by `noise` `(envs, size)` float32, log probabilities and values `(envs,)`."""
        assert isinstance(self.trainer, OnPolicyTrainer)
        with torch.inference_mode():
            inputs = torch.from_numpy(obs), torch.from_numpy(noise), *_as_tensors(masks)
            action, log_prob, value = self.trainer.explore(*inputs)
            return action.numpy(), log_prob.numpy(), value.numpy()

    def explore_into(
        self,
        obs: np.ndarray,
        noise: np.ndarray,
        action: np.ndarray,
        log_prob: np.ndarray,
        value: np.ndarray,
        masks: np.ndarray | None = None,
    ) -> None:
        """The same into arrays."""
        action[:], log_prob[:], value[:] = self.explore(obs, noise, masks)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """The value network's estimates `(envs,)` float32 of observations `(envs, *obs)`, float32 or bytes."""
        assert isinstance(self.trainer, OnPolicyTrainer)
        with torch.inference_mode():
            return self.trainer.values(torch.from_numpy(obs)).numpy()


def _as_tensors(masks: np.ndarray | None) -> tuple[torch.Tensor, ...]:
    """The further argument of a trainer that uses action masks."""
    return () if masks is None else (torch.from_numpy(masks),)
