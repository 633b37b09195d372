"""The update rules of the built-in algorithms, natively: what each reads from its trainer, and one step of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn

from pearl import _native
from pearl.algorithms.actor_critic import TwinCriticTrainer
from pearl.algorithms.ddpg import DDPG
from pearl.algorithms.dqn import DQN
from pearl.algorithms.networks import Critic, Policy, ToUnit, TwinCritic
from pearl.algorithms.sac import SAC, GaussianPolicy
from pearl.algorithms.td3 import TD3
from pearl.learner.native_optimizer import NativeOptimizer
from pearl.learner.native_plan import (
    PinnedWeights,
    UnsupportedError,
    check_same_structure,
    check_update_rule,
    read_network,
    weights_of,
)

Columns: TypeAlias = Mapping[str, np.ndarray]

_STEP = ("update_policy", "end_of_step", "phases", "finish_step")
_DQN_RULE = (*_STEP, "_compute", "_apply")
_ACTOR_CRITIC_RULE = (
    *_STEP,
    *("_critic_phase", "_actor_phase", "_compute_critic", "_apply_critic", "_compute_actor", "_apply_actor"),
    *("_descend_actor", "_step", "_next_value", "_deal_noise", "_moves_policy"),
)
_WRAPPERS: dict[type, tuple[type, type]] = {
    DDPG: (Policy, Critic),
    TD3: (Policy, TwinCritic),
    SAC: (GaussianPolicy, TwinCritic),
}


class Rule(Protocol):
    """One algorithm's update rule, on one trainer."""

    action_dtype: np.dtype[Any]

    def step(self, columns: Columns) -> tuple[np.ndarray, dict[str, float]]:
        """Train on a batch's columns and its "weights"; returns priorities `(batch,)` and metrics."""

    def algorithm(self) -> _native.Algorithm | None:
        """The same step for a loop without Python, with the settings of now; None where it needs Python."""


def make_rule(trainer: object, threads: int) -> Rule:
    """The rule of `trainer`; UnsupportedError names in one line what cannot be done natively."""
    device = getattr(trainer, "device", torch.device("cpu"))
    if torch.device(device).type != "cpu":
        raise UnsupportedError(f"device {device}")
    if isinstance(trainer, (DQN, DDPG, TD3, SAC)):
        if trainer.observation_space.dtype == np.uint8:
            raise UnsupportedError("observations of unsigned bytes")
        return _DqnRule(trainer, threads) if isinstance(trainer, DQN) else _ActorCriticRule(trainer, threads)
    raise UnsupportedError(f"the update rule of {type(trainer).__name__}, which is no DQN, DDPG, TD3 or SAC")


class _DqnRule:
    action_dtype = np.dtype(np.int64)

    def __init__(self, trainer: DQN, threads: int) -> None:
        check_update_rule(trainer, DQN, _DQN_RULE)
        online, target = trainer._q_flat, trainer._target_flat
        network = read_network("q", trainer.q, trainer.input_shape, online)
        check_same_structure("q", trainer.q, online, trainer.target_q, target)
        self._trainer = trainer
        self._optimizer = NativeOptimizer("optimizer", trainer.optimizer, online.parameter)
        self._native = _native.DqnLearner(network, weights_of(online), weights_of(target), threads)
        self._weights = PinnedWeights(online, target)
        self._settings: tuple[object, ...] = ()

    def algorithm(self) -> _native.Algorithm:
        self._refresh()
        return self._native.algorithm(self._optimizer.native, self._trainer.step_count)

    def _refresh(self) -> None:
        self._weights.require_in_place()
        trainer = self._trainer
        settings = (
            bool(trainer.double),
            float(trainer.max_grad_norm),
            float(trainer.tau),
            int(trainer.target_update_interval),
        )
        if settings != self._settings:
            double, max_grad_norm, tau, interval = settings
            self._native.set(double, "huber", max_grad_norm, tau, interval)
            self._settings = settings
        self._optimizer.refresh()

    def step(self, columns: Columns) -> tuple[np.ndarray, dict[str, float]]:
        self._refresh()
        trainer = self._trainer
        priorities, loss, td_error, norm = self._native.step(
            columns["obs"],
            columns["action"],
            columns["reward"],
            columns["next_obs"],
            columns["discount"],
            columns["weights"],
            trainer.gradient_steps + 1,
            self._optimizer.native,
        )
        trainer.gradient_steps += 1
        return priorities, {"td_error": td_error, "loss": loss, "gradient_norm": norm}


class _ActorCriticRule:
    """DDPG, TD3 and SAC, on the noise that the trainer's own step would draw."""

    action_dtype = np.dtype(np.float32)

    def __init__(self, trainer: DDPG | TD3 | SAC, threads: int) -> None:
        base = next(known for known in _WRAPPERS if isinstance(trainer, known))
        check_update_rule(trainer, base, tuple(name for name in _ACTOR_CRITIC_RULE if hasattr(base, name)))
        for module, wrapper in zip((trainer.actor, trainer.critic), _WRAPPERS[base], strict=True):
            if type(module) is not wrapper:
                raise UnsupportedError(f"a {type(module).__name__} in place of a {wrapper.__name__}")
        actor, critic = trainer.actor, trainer.critic
        observations, actions = actor.observation_scale.center.numel(), actor.action_scale.center.numel()
        networks = (critic.first, critic.second) if isinstance(critic, TwinCritic) else (critic.network,)
        targets = trainer.target_critic
        target_networks = (targets.first, targets.second) if isinstance(targets, TwinCritic) else (targets.network,)
        native_actor = read_network("actor", actor.network, (observations,), trainer._actor_flat)
        native_critics = []
        for number, (network, target) in enumerate(zip(networks, target_networks, strict=True)):
            name = f"critic {number + 1}"
            shape = (observations + actions,)
            native_critics.append(read_network(name, network, shape, trainer._critic_flat))
            check_same_structure(name, network, trainer._critic_flat, target, trainer._target_critic_flat)
        target_actor = None
        if not isinstance(trainer, SAC):
            flat = trainer._target_actor_flat
            check_same_structure("actor", actor.network, trainer._actor_flat, trainer.target_actor.network, flat)
            target_actor = weights_of(flat)
        self._trainer = trainer
        self._actor = NativeOptimizer("actor_optimizer", trainer.actor_optimizer, trainer._actor_flat.parameter)
        self._critic = NativeOptimizer("critic_optimizer", trainer.critic_optimizer, trainer._critic_flat.parameter)
        self._log_alpha: np.ndarray | None = None
        self._temperature: NativeOptimizer | None = None
        if isinstance(trainer, SAC):
            self._log_alpha = trainer.log_alpha.detach().numpy().reshape(1)
            if trainer.temperature is None:
                optimizer = trainer.temperature_optimizer
                self._temperature = NativeOptimizer("temperature_optimizer", optimizer, trainer.log_alpha)
        self._native = _native.ActorCriticLearner(
            native_actor,
            native_critics,
            weights_of(trainer._actor_flat),
            target_actor,
            weights_of(trainer._critic_flat),
            weights_of(trainer._target_critic_flat),
            *scale_arrays(critic.observation_scale),
            *scale_arrays(critic.action_scale),
            threads,
        )
        flats = (trainer._actor_flat, trainer._critic_flat, trainer._target_critic_flat)
        scalar = trainer.log_alpha if isinstance(trainer, SAC) else None
        followers = () if isinstance(trainer, SAC) else (trainer._target_actor_flat,)
        self._weights = PinnedWeights(*flats, *followers, scalar=scalar)
        self._settings: tuple[object, ...] = ()

    def algorithm(self) -> _native.Algorithm | None:
        trainer = self._trainer
        noise_seed: np.ndarray | None = None
        if not isinstance(trainer, DDPG):
            if inspect.getattr_static(trainer, "draw_noise") is not TwinCriticTrainer.draw_noise:
                return None  # noise of the trainer's own
            noise_seed = trainer.noise_seed.numpy().reshape(1)
        self._apply_settings()
        self._critic.refresh()
        self._actor.refresh()
        if self._temperature is not None:
            self._temperature.refresh()
        return self._native.algorithm(
            self._critic.native,
            self._actor.native,
            None if self._temperature is None else self._temperature.native,
            self._log_alpha,
            noise_seed,
            self._policy_delay,
            trainer.step_count,
        )

    @property
    def _policy_delay(self) -> int:
        return self._trainer.policy_delay if isinstance(self._trainer, TD3) else 1

    def _apply_settings(self) -> None:
        self._weights.require_in_place()
        settings = settings_of(self._trainer)
        if settings != self._settings:
            self._native.set(*settings)
            self._settings = settings

    def step(self, columns: Columns) -> tuple[np.ndarray, dict[str, float]]:
        trainer = self._trainer
        self._apply_settings()
        moves = (trainer.gradient_steps + 1) % self._policy_delay == 0
        rows = len(columns["reward"])
        next_noise = None if isinstance(trainer, DDPG) else trainer.draw_noise(rows, 0).numpy()
        noise = trainer.draw_noise(rows, 1).numpy() if isinstance(trainer, SAC) else None
        self._critic.refresh()
        if moves:
            self._actor.refresh()
        if self._temperature is not None:
            self._temperature.refresh()
        priorities, loss, td_error, norm, actor_norm = self._native.step(
            columns["obs"],
            columns["action"],
            columns["reward"],
            columns["next_obs"],
            columns["discount"],
            columns["weights"],
            next_noise,
            noise,
            moves,
            moves,
            self._critic.native,
            self._actor.native,
            None if self._temperature is None else self._temperature.native,
            self._log_alpha,
        )
        trainer.gradient_steps += 1
        metrics = {"td_error": td_error, "loss": loss, "gradient_norm": norm}
        if moves:
            metrics["actor_gradient_norm"] = actor_norm
        if self._log_alpha is not None:
            metrics["temperature"] = math.exp(float(self._log_alpha[0]))
        return priorities, metrics


def settings_of(trainer: DDPG | TD3 | SAC) -> tuple[bool, float, float, float, float, float, float, float, float]:
    """stochastic, saturation_penalty, target_noise, noise_clip, log_std bounds, target_entropy, tau, max_grad_norm."""
    penalty = noise = clip = entropy = 0.0
    low, high = -math.inf, math.inf
    if isinstance(trainer, DDPG):
        penalty = float(trainer.saturation_penalty)
    elif isinstance(trainer, TD3):
        noise, clip = float(trainer.target_noise), float(trainer.noise_clip)
    else:
        low, high = trainer.actor._log_std_bounds
        entropy = float(trainer._target_entropy)
    stochastic = isinstance(trainer, SAC)
    return stochastic, penalty, noise, clip, low, high, entropy, float(trainer.tau), float(trainer.max_grad_norm)


def scale_arrays(scale: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Centers and half ranges, `(size,)` float32 each."""
    assert isinstance(scale, ToUnit)
    return scale.center.numpy(), scale.half_range.numpy()
