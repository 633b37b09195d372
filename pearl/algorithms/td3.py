"""Twin delayed deep deterministic policy gradient: Fujimoto, van Hoof and Meger 2018."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pearl.algorithms.actor_critic import TwinCriticTrainer
from pearl.algorithms.arrays import ArrayParts, TorchRandom
from pearl.algorithms.batch import Batch
from pearl.algorithms.suggestions import Facts
from pearl.algorithms.trainer import Phase, is_number
from pearl.algorithms.update_rule import RuleStep, Scalars, UpdateRule
from pearl.exploration import Exploration, GaussianNoise
from pearl.lazy_torch import nn, torch
from pearl.learner.flat import FlatParameters

if TYPE_CHECKING:
    from pearl.algorithms.networks import Policy, TwinCritic


class TD3(TwinCriticTrainer):
    """TD3 for bounded continuous actions, with the settings of the authors' code (its batch of 256, its 3e-4).

    Targets take the smaller of two critics at the target policy's action plus normal noise of `target_noise`, clipped
    at `noise_clip` (both in units of half the action range). The policy and all targets are updated every
    `policy_delay` steps.
    """

    _algorithm: ClassVar[str] = "TD3"

    policy_delay: int = 2
    target_noise: float = 0.2
    noise_clip: float = 0.5
    exploration: Exploration | None = GaussianNoise()

    actor: Policy
    critic: TwinCritic

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """For bounded actions where random ones find nothing: its exploration is free to be correlated noise."""
        return f"bounded actions, and {facts.silence}" if facts.bounded_vectors and facts.silent else ""

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        delay = self.policy_delay
        self._require(type(delay) is int and delay >= 1, "policy_delay", "a whole number of at least 1")
        for name in ("target_noise", "noise_clip"):
            value = getattr(self, name)
            self._require(is_number(value) and value >= 0, name, "a number of at least 0")

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """The networks of both critics, and the policy's target."""
        parts = super().array_parts(random)
        if parts is not None:
            self._add_target_actor(parts, self._array_actor(self._array_mlp_of_actor(random)))
        return parts

    def build(self) -> None:
        """The networks of both critics, and the policy's target."""
        super().build()
        self.target_actor = self._wrap_actor(self._made_network("build_actor", self.actor)).to(self.device)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self._target_actor_flat = FlatParameters(self.target_actor, gradients=False)

    def _wrap_actor(self, network: nn.Module) -> Policy:
        """`tanh` of the network, rescaled to the action's bounds."""
        from pearl.algorithms.networks import Policy

        return Policy(network, *self._boxes, self.scale_observations)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Critics, and in every `policy_delay`-th step the actor against the updated first critic."""
        return self._delayed_phases(self.policy_delay)

    def _next_value(self, next_obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        disturbance = (self.target_noise * noise).clamp_(-self.noise_clip, self.noise_clip)
        unit = (self.target_actor.unit(next_obs) + disturbance).clamp_(-1.0, 1.0)
        return torch.minimum(*self.target_critic.of_unit(next_obs, unit))

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        inputs = self.critic.inputs(batch.obs, self.actor.unit(batch.obs))
        self._descend_actor(-self.critic.first(inputs).sum() / batch_size)

    def finish_step(self) -> None:
        """Polyak updates of all targets, in the steps that update the policy."""
        if self.gradient_steps % self.policy_delay == 0:
            self._target_actor_flat.move_toward(self._actor_flat, self.tau)
            self._target_critic_flat.move_toward(self._critic_flat, self.tau)

    def update_rule(self) -> UpdateRule:
        """Two critics whose targets take the target policy's action plus noise."""
        step = self._rule_step()
        return dataclasses.replace(super().update_rule(), step=step, bootstrap="disturbed_target_action")

    def _rule_step(self) -> RuleStep | str:
        departure = self._step_departure(TD3, "Policy", "TwinCritic")
        if departure is not None:
            return departure
        critic = self.parts.critic
        scales = critic.observation_scale, critic.action_scale
        noise = self._rule_noise(of_policy=False)
        return RuleStep("squared", self._rule_scalars, *self._rule_parameters(), *scales, noise)

    def _rule_scalars(self) -> Scalars:
        return Scalars(
            float(self.max_grad_norm),
            float(self.tau),
            target_noise=float(self.target_noise),
            noise_clip=float(self.noise_clip),
            policy_delay=self.policy_delay,
        )
