"""Soft actor-critic with automatic temperature: Haarnoja et al. 2018, arXiv:1812.05905."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pearl.algorithms.actor_critic import ActorCritic, TwinCriticTrainer
from pearl.algorithms.arrays import ArrayAdam, ArrayParts, ArrayValue, TorchRandom
from pearl.algorithms.batch import Batch
from pearl.algorithms.suggestions import Choice, Facts
from pearl.algorithms.trainer import Phase, is_number
from pearl.algorithms.update_rule import (
    PolicyHead,
    RuleStep,
    RuleTemperature,
    Scalars,
    UpdateRule,
    policy_departure,
)
from pearl.exploration import Exploration, PolicySampling
from pearl.lazy_torch import nn, torch

if TYPE_CHECKING:
    from pearl.algorithms.networks import GaussianPolicy


class SAC(TwinCriticTrainer):
    """SAC for bounded continuous actions.

    The temperature is the weight of the policy's entropy relative to its return. By default it is learned, starting at
    `initial_temperature`, so that the entropy (of actions in unit scale) approaches `target_entropy` (None: minus the
    action's size). A given `temperature` stays fixed.
    """

    _algorithm: ClassVar[str] = "SAC"

    temperature: float | None = None
    initial_temperature: float = 1.0
    temperature_learning_rate: float = 3e-4
    target_entropy: float | None = None
    log_std_bounds: tuple[float, float] = (-20.0, 2.0)
    exploration: Exploration | None = PolicySampling()

    actor: GaussianPolicy

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """For bounded actions."""
        if not facts.bounded_vectors:
            return ""
        return f"{facts.described_spaces}, bounded: learned from a replay (Haarnoja et al. 2018)"

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Also the temperature's learning rate."""
        choices = super().suggestions(facts)
        rate = next(choice for choice in choices if choice.name == "learning_rate")
        return (*choices, Choice("temperature_learning_rate", rate.value, "as that of the networks"))

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        fixed, first, entropy = self.temperature, self.initial_temperature, self.target_entropy
        weighs = fixed is None or (is_number(fixed) and 0 <= fixed < math.inf)
        self._require(weighs, "temperature", "a finite number of at least 0, or None for a learned one")
        self._require(is_number(first) and 0 < first < math.inf, "initial_temperature", "a number above 0, and finite")
        aims = entropy is None or (is_number(entropy) and math.isfinite(entropy))
        self._require(aims, "target_entropy", "a finite number, or None for minus the size of an action")
        bounds = self.log_std_bounds
        is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(is_number, bounds))
        self._require(is_pair and bounds[0] < bounds[1], "log_std_bounds", "a pair of numbers, smaller bound first")
        self._target_entropy = -float(self.action_size) if self.target_entropy is None else self.target_entropy

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """The networks of both critics, and the temperature with its optimizer."""
        parts = super().array_parts(random)
        if parts is None:
            return None
        if self.temperature is None:
            parts.log_alpha = ArrayValue(np.array(math.log(self.initial_temperature), np.float32))
            parts.temperature_optimizer = ArrayAdam((), self.temperature_learning_rate)
        else:
            with np.errstate(divide="ignore"):
                log_alpha = np.log(np.array(self.temperature, np.float32))
            parts.log_alpha = ArrayValue(np.asarray(log_alpha), saved=False)
        return parts

    def build(self) -> None:
        """The networks of both critics, and the temperature with its optimizer."""
        super().build()
        if self.temperature is None:
            self.log_alpha = torch.tensor(math.log(self.initial_temperature), device=self.device)
            self.log_alpha.requires_grad_().grad = torch.zeros_like(self.log_alpha)
            self.temperature_optimizer = torch.optim.Adam(
                [self.log_alpha], lr=self.temperature_learning_rate, fused=True
            )
        else:
            self.log_alpha = torch.tensor(self.temperature, device=self.device).log()

    def _wrap_actor(self, network: nn.Module) -> GaussianPolicy:
        """A squashed normal distribution of the network's outputs, rescaled to the action's bounds."""
        from pearl.algorithms.networks import GaussianPolicy

        return GaussianPolicy(network, *self._boxes, self.scale_observations, self.log_std_bounds)

    @property
    def _actor_outputs(self) -> tuple[int, str]:
        return 2 * self.action_size, "a mean and a log standard deviation"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Critics, then actor (and temperature) against the updated critics."""
        return (self._critic_phase, self._actor_phase)

    def sample_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions `(envs, *action)` float32 drawn from the policy by standard normal `noise` of the same shape."""
        mean, log_std = self.actor.normal(obs)
        return self.actor.act(mean + log_std.exp() * noise.flatten(1))

    def metrics(self) -> Mapping[str, float]:
        """The temperature."""
        return {"temperature": math.exp(self.parts.log_alpha.item())}

    @property
    def _draws(self) -> int:
        return len(self.phases)  # for the targets' actions, and for the policy's where it moves

    def _next_value(self, next_obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        unit, log_prob = self.actor.sample(next_obs, noise)
        return self._target_of(next_obs, unit) - self.log_alpha.exp() * log_prob

    def _target_of(self, next_obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The values `(batch,)` of unit-scale actions by the critics' targets."""
        return torch.minimum(*self.target_critic.of_unit(next_obs, unit))

    def _judged(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The values `(batch,)` of the policy's unit-scale actions by the critics."""
        return torch.minimum(*self.critic.of_unit(obs, unit))

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        unit, log_prob = self.actor.sample(batch.obs, self._deal_noise(len(weights), batch_size, draw=1))
        value = self._judged(batch.obs, unit)
        temperature = self.log_alpha.detach().exp()
        self._descend_actor((temperature * log_prob - value).sum() / batch_size)
        if self.log_alpha.grad is not None:
            # The gradient of the loss -log_alpha * mean(log_prob + target entropy), which is linear in log_alpha.
            self.log_alpha.grad.sub_((log_prob.detach() + self._target_entropy).sum() / batch_size)

    def _apply_actor(self) -> None:
        super()._apply_actor()
        if self.log_alpha.grad is not None:
            self.temperature_optimizer.step()
            self.log_alpha.grad.zero_()

    def finish_step(self) -> None:
        """Polyak update of the critics' target."""
        self._target_critic_flat.move_toward(self._critic_flat, self.tau)

    def update_rule(self) -> UpdateRule:
        """Two critics, both in the policy's gradient; targets take actions sampled from the policy."""
        rule = super().update_rule()
        return dataclasses.replace(rule, step=self._rule_step(), bootstrap="sampled_action", actor_critics=2)

    def _policy_head(self) -> PolicyHead:
        departure = policy_departure(self, ActorCritic, ("get_action", "policy"))
        departure = departure or policy_departure(self, SAC, ("sample_action",))
        departure = departure or self._other_policy("GaussianPolicy")
        head = self._head("gaussian", departure)
        return head if departure else dataclasses.replace(head, log_std_bounds=self._present_bounds)

    @property
    def _present_bounds(self) -> tuple[float, float]:
        return self.log_std_bounds if self.arrays is not None else self.actor._log_std_bounds

    def _rule_step(self) -> RuleStep | str:
        return self._step_of(SAC, "TwinCritic")

    def _step_of(self, base: type[SAC], critic: str) -> RuleStep | str:
        """The step of a trainer whose class is `base`, with critics of the class `critic`."""
        departure = self._step_departure(base, "GaussianPolicy", critic)
        if departure is not None:
            return departure
        parts = self.parts
        scales = parts.critic.observation_scale, parts.critic.action_scale
        learned = self.temperature is None
        temperature = RuleTemperature(parts.log_alpha, parts.temperature_optimizer if learned else None)
        noise = self._rule_noise(of_policy=True)
        return RuleStep("squared", self._rule_scalars, *self._rule_parameters(), *scales, noise, temperature)

    def _rule_scalars(self) -> Scalars:
        return Scalars(
            float(self.max_grad_norm),
            float(self.tau),
            log_std_bounds=self._present_bounds,
            target_entropy=float(self._target_entropy),
        )
