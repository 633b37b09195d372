"""Native update rules: the engine's form of an algorithm's rule, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pearl import _native
from pearl.algorithms.arrays import ArrayScale
from pearl.algorithms.batch import Batch
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import Trainer, arrays_of
from pearl.algorithms.update_rule import (
    AnyParameters,
    AnyScale,
    ClippedStep,
    RuleNetwork,
    RuleParameters,
    RuleStep,
    Scalars,
    UpdateRule,
    unknown_rule,
    update_rule_of,
)
from pearl.lazy_torch import torch
from pearl.learner.native_optimizer import NativeOptimizer
from pearl.learner.native_plan import (
    PinnedWeights,
    UnsupportedError,
    check_same_structure,
    memory_of,
    read_network,
    weights_of,
)
from pearl.spec import NEXT_ACTION_MASK


class Rule(Protocol):
    """One algorithm's update rule, on one trainer."""

    action_dtype: np.dtype[Any]
    obs_dtype: np.dtype[Any]
    columns: tuple[str, ...]  # of a batch: those of `Batch`, and the mask of the next observation if there are masks

    def step(self, columns: Sequence[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        """Train on these columns and importance weights; returns priorities `(batch,)` and metrics."""

    def algorithm(self) -> _native.Algorithm | None:
        """The same step for a loop without Python, with the current settings; None if it needs Python."""

    def refresh(self) -> object:
        """Read the trainer's settings and its optimizers' state, which schedules and checkpoints change."""


def _known_rule(
    trainer: object, arrays: bool, of_bytes: bool = False, masks: bool = False, quantiles: bool = False
) -> tuple[Trainer, UpdateRule]:
    rule = update_rule_of(trainer, arrays=arrays)
    if rule is None or not isinstance(trainer, Trainer):
        raise UnsupportedError(unknown_rule(trainer))
    if trainer.observation_space.dtype == np.uint8 and (rule.actor is not None or not of_bytes):
        raise UnsupportedError("observations of unsigned bytes")
    if isinstance(rule.step, str):
        raise UnsupportedError(rule.step)
    if rule.masked and not masks:
        raise UnsupportedError("action masks, which this Learner does not take; torch does")
    if rule.quantiles and not quantiles:
        raise UnsupportedError("quantiles of the return, which this Learner does not train; native and torch do")
    return trainer, rule


def known_step(
    trainer: object, *, arrays: bool = False, of_bytes: bool = False, masks: bool = False, quantiles: bool = False
) -> tuple[Trainer, UpdateRule, RuleStep]:
    """The trainer with its rule and its step; UnsupportedError if the trainer has none, or departs from it.

    They are in torch, or with `arrays` where the trainer has them. Observations may be bytes with `of_bytes`, if there
    is no actor; with `masks`, the step may need action masks; with `quantiles`, critics may give these.
    """
    known, rule = _known_rule(trainer, arrays, of_bytes, masks, quantiles)
    if not isinstance(rule.step, RuleStep):
        raise UnsupportedError(f"{type(trainer).__name__}, which trains on rollouts, not on samples of a replay")
    return known, rule, rule.step


def known_clipped_step(trainer: object) -> tuple[OnPolicyTrainer, UpdateRule, ClippedStep]:
    """The same for trainers on rollouts, in arrays where the trainer has them there; it may need action masks."""
    known, rule = _known_rule(trainer, arrays=True, masks=True)
    if not isinstance(known, OnPolicyTrainer) or not isinstance(rule.step, ClippedStep):
        raise UnsupportedError(f"{type(trainer).__name__}, which trains on samples of a replay, not on rollouts")
    return known, rule, rule.step


def require_cpu(trainer: object) -> None:
    """Raise UnsupportedError for a trainer on another device."""
    if arrays_of(trainer) is not None:
        return
    device = getattr(trainer, "device", torch.device("cpu"))
    if torch.device(device).type != "cpu":
        raise UnsupportedError(f"device {device}")


def make_rule(trainer: object, threads: int) -> Rule:
    """The rule of `trainer`; UnsupportedError says in one line what is not supported."""
    require_cpu(trainer)
    known, rule, step = known_step(trainer, arrays=True, of_bytes=True, masks=True, quantiles=True)
    if rule.actor is None:
        return _ValueRule(known, rule, step, threads)
    return _ActorCriticRule(known, rule.actor, rule, step, threads)


def _read_with_target(
    network: RuleNetwork, moved: RuleParameters, *, images: bool = False, of_bytes: bool = False
) -> _native.Network:
    flat = moved.parameters
    read = read_network(network.name, network.module, network.input_shape, flat, images=images, of_bytes=of_bytes)
    _check_target(network, moved)
    return read


def _check_target(network: RuleNetwork, moved: RuleParameters) -> None:
    if network.target is None or moved.target is None:
        raise UnsupportedError(f"network {network.name!r} without a target network")
    check_same_structure(network.name, network.module, moved.parameters, network.target, moved.target)


def _weights_of_target(moved: RuleParameters) -> np.ndarray:
    assert moved.target is not None
    return weights_of(moved.target)


def pinned(step: RuleStep) -> PinnedWeights:
    """The memory that a kernel takes from a step."""
    vectors: list[AnyParameters] = [flat for flat in step.vectors if flat is not None]
    return PinnedWeights(*vectors, scalar=None if step.temperature is None else step.temperature.log_alpha)


class _ValueRule:
    """A value of each action, by one network: DQN."""

    action_dtype = np.dtype(np.int64)

    def __init__(self, trainer: Trainer, rule: UpdateRule, step: RuleStep, threads: int) -> None:
        (network,) = rule.critics
        of_bytes = trainer.observation_space.dtype == np.uint8
        self.obs_dtype = np.dtype(np.uint8 if of_bytes else np.float32)
        read = _read_with_target(network, step.critics, images=True, of_bytes=of_bytes)
        self._trainer, self._step, self._masked = trainer, step, rule.masked
        self.columns: tuple[str, ...] = (*Batch._fields, NEXT_ACTION_MASK) if rule.masked else Batch._fields
        self._optimizer = NativeOptimizer(*step.optimizers[0])
        weights = weights_of(step.critics.parameters), _weights_of_target(step.critics)
        self._native = _native.DqnLearner(read, *weights, threads, rule.quantiles)
        self._weights = pinned(step)
        self._scalars: Scalars | None = None

    def algorithm(self) -> _native.Algorithm:
        self.refresh()
        return self._native.algorithm(self._optimizer.native, self._trainer.step_count, self._masked)

    def refresh(self) -> None:
        self._weights.require_in_place()
        scalars = self._step.scalars()
        if scalars != self._scalars:
            self._native.set(
                scalars.double, self._step.loss, scalars.max_grad_norm, scalars.tau, scalars.target_interval
            )
            self._scalars = scalars
        self._optimizer.refresh()

    def step(self, columns: Sequence[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        self.refresh()
        trainer = self._trainer
        obs, action, reward, next_obs, discount, *masks = columns
        done = trainer.gradient_steps + 1
        priorities, loss, td_error, norm = self._native.step(
            obs, action, reward, next_obs, discount, weights, done, self._optimizer.native, *masks
        )
        trainer.gradient_steps += 1
        return priorities, {"td_error": td_error, "loss": loss, "gradient_norm": norm}


class _ActorCriticRule:
    """Actor and critics, on the noise that the trainer's own step would draw."""

    action_dtype = obs_dtype = np.dtype(np.float32)
    columns: tuple[str, ...] = Batch._fields

    def __init__(self, trainer: Trainer, actor: RuleNetwork, rule: UpdateRule, step: RuleStep, threads: int) -> None:
        moved = step.actor
        assert moved is not None
        assert step.observation_scale is not None
        assert step.action_scale is not None
        native_actor = read_network(actor.name, actor.module, actor.input_shape, moved.parameters)
        native_critics = [_read_with_target(critic, step.critics) for critic in rule.critics]
        target_actor = None
        if moved.target is not None:
            _check_target(actor, moved)
            target_actor = weights_of(moved.target)
        self._trainer, self._step, self._ensemble = trainer, step, rule.ensemble
        self._critic, self._actor, *temperature = (NativeOptimizer(*named) for named in step.optimizers)
        self._temperature = temperature[0] if temperature else None
        log_alpha = None if step.temperature is None else step.temperature.log_alpha
        self._log_alpha = None if log_alpha is None else memory_of(log_alpha)
        self._native = _native.ActorCriticLearner(
            native_actor,
            native_critics,
            weights_of(moved.parameters),
            target_actor,
            weights_of(step.critics.parameters),
            _weights_of_target(step.critics),
            *scale_arrays(step.observation_scale),
            *scale_arrays(step.action_scale),
            threads,
        )
        self._weights = pinned(step)
        self._scalars: Scalars | None = None

    def algorithm(self) -> _native.Algorithm | None:
        noise = self._step.noise
        if noise is not None and noise.departure is not None:
            return None
        scalars = self.refresh()
        return self._native.algorithm(
            self._critic.native,
            self._actor.native,
            None if self._temperature is None else self._temperature.native,
            self._log_alpha,
            None if noise is None else memory_of(noise.seed),
            scalars.policy_delay,
            self._trainer.step_count,
        )

    def refresh(self) -> Scalars:
        self._weights.require_in_place()
        scalars = self._step.scalars()
        if scalars != self._scalars:
            self._native.set(
                self._step.temperature is not None,
                scalars.saturation_penalty,
                scalars.target_noise,
                scalars.noise_clip,
                *scalars.log_std_bounds,
                scalars.target_entropy,
                scalars.tau,
                scalars.max_grad_norm,
                scalars.target_critics,
                scalars.dropped_quantiles,
            )
            self._scalars = scalars
        self._critic.refresh()
        self._actor.refresh()
        if self._temperature is not None:
            self._temperature.refresh()
        return scalars

    def step(self, columns: Sequence[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        trainer, random = self._trainer, self._step.noise
        scalars = self.refresh()
        moves = (trainer.gradient_steps + 1) % scalars.policy_delay == 0
        obs, action, reward, next_obs, discount = columns
        rows = len(reward)
        next_noise = None if random is None else np.asarray(random.draw(rows, 0))
        noise = np.asarray(random.draw(rows, 1)) if random is not None and random.of_policy else None
        priorities, loss, td_error, norm, actor_norm = self._native.step(
            obs,
            action,
            reward,
            next_obs,
            discount,
            weights,
            next_noise,
            noise,
            moves,
            moves or self._ensemble,
            self._critic.native,
            self._actor.native,
            None if self._temperature is None else self._temperature.native,
            self._log_alpha,
            0 if random is None else int(random.seed.item()),
            trainer.gradient_steps,
        )
        trainer.gradient_steps += 1
        metrics = {"td_error": td_error, "loss": loss, "gradient_norm": norm}
        if moves:
            metrics["actor_gradient_norm"] = actor_norm
        if self._log_alpha is not None:
            metrics["temperature"] = math.exp(float(self._log_alpha[0]))
        return priorities, metrics


def scale_arrays(scale: AnyScale) -> tuple[np.ndarray, np.ndarray]:
    """Centers and half ranges, `(size,)` float32 each."""
    if isinstance(scale, ArrayScale):
        return scale.center.values, scale.half_range.values
    return scale.center.numpy(), scale.half_range.numpy()
