"""A policy in torch: any trainer's own `get_action`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import (
    RecurrentRolloutTrainer,
    RecurrentTrainer,
    SamplesActions,
    TrainerLike,
    set_evaluation_mode,
)
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


class RecurrentTorchPolicy(TorchPolicy):
    """The same for a trainer with a recurrent policy: see `pearl.actors.actor.RecurrentPolicy`."""

    def __init__(self, trainer: TrainerLike) -> None:
        super().__init__(trainer)
        assert isinstance(trainer, RecurrentTrainer)
        self._recurrent = trainer
        self._device = trainer.initial_state(1).device

    def initial_state(self, count: int) -> np.ndarray:
        """The states `(count, size)` float32 at the beginning of an episode."""
        with torch.inference_mode():
            return self._recurrent.initial_state(count).cpu().numpy()

    def act_from(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Greedy actions `(envs, *action)` for `obs` `(envs, *obs)` in `state` `(envs, size)`; the next states."""
        with torch.inference_mode():
            action, next_state = self._recurrent.get_action_from(*self._on_device(obs, state))
            return action.cpu().numpy(), next_state.cpu().numpy()

    def _on_device(self, *arrays: np.ndarray) -> Iterator[torch.Tensor]:
        return (torch.from_numpy(array).to(self._device) for array in arrays)


class RecurrentRolloutTorchPolicy(RecurrentTorchPolicy):
    """The same for on-policy trainers: see `pearl.actors.actor.RecurrentRolloutPolicy`."""

    def __init__(self, trainer: TrainerLike) -> None:
        super().__init__(trainer)
        assert isinstance(trainer, RecurrentRolloutTrainer)
        self._collects = trainer

    def sample_from(self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `act_from`, drawn from the policy's distribution by `noise` `(envs, size)` float32."""
        with torch.inference_mode():
            action, after = self._collects.sample_action_from(*self._on_device(obs, noise, state))
            return action.cpu().numpy(), after.cpu().numpy()

    def initial_rollout_state(self, count: int) -> np.ndarray:
        """The states `(count, size)` float32 of rollouts at the beginning of an episode."""
        with torch.inference_mode():
            return self._collects.initial_rollout_state(count).cpu().numpy()

    def explore_from(
        self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `explore`, in states `(envs, size)` of rollouts; also the next states."""
        with torch.inference_mode():
            found = self._collects.explore_from(*self._on_device(obs, noise, state))
            action, log_prob, value, after = (part.cpu().numpy() for part in found)
            return action, log_prob, value, after

    def value_from(self, obs: np.ndarray, state: np.ndarray) -> np.ndarray:
        """As `value`, in states `(envs, size)` of rollouts."""
        with torch.inference_mode():
            return self._collects.values_from(*self._on_device(obs, state)).cpu().numpy()


def torch_policy(trainer: TrainerLike) -> TorchPolicy:
    """The policy of `trainer` in torch, recurrent if the trainer's is."""
    if isinstance(trainer, RecurrentRolloutTrainer):
        return RecurrentRolloutTorchPolicy(trainer)
    return RecurrentTorchPolicy(trainer) if isinstance(trainer, RecurrentTrainer) else TorchPolicy(trainer)


def _as_tensors(masks: np.ndarray | None) -> tuple[torch.Tensor, ...]:
    """The further argument of a trainer that uses action masks."""
    return () if masks is None else (torch.from_numpy(masks),)
