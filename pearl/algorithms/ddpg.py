"""Deep deterministic policy gradient: Lillicrap et al. 2016."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pearl.algorithms.actor_critic import ActorCritic
from pearl.algorithms.arrays import ArrayModule, ArrayParts, TorchRandom, copy_arrays
from pearl.algorithms.batch import Batch
from pearl.algorithms.trainer import Phase, is_number
from pearl.algorithms.update_rule import RuleStep, Scalars, UpdateRule
from pearl.exploration import Exploration, OrnsteinUhlenbeck
from pearl.lazy_torch import functional, nn, torch
from pearl.learner.flat import FlatParameters

if TYPE_CHECKING:
    from pearl.algorithms.networks import Critic, Policy

_LINEAR_RANGE = 2.0  # tanh(2) = 0.96
_FINAL_RANGE = 3e-3  # of the last layers' initial weights (Lillicrap et al. 2016, Sec. 7): actions start unsaturated


def _shrink_last_layer(network: nn.Module) -> None:
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if linear:
        for parameter in linear[-1].parameters():
            nn.init.uniform_(parameter, -_FINAL_RANGE, _FINAL_RANGE)


def _shrink_last_arrays(network: ArrayModule, random: TorchRandom) -> None:
    for _, array in network.named_parameters()[-2:]:
        array.values[...] = random.uniform(array.shape, -_FINAL_RANGE, _FINAL_RANGE)


class DDPG(ActorCritic):
    """DDPG for bounded continuous actions. Networks default to the paper's hidden sizes (256, 128), Table III.

    `saturation_penalty` penalises outputs of the policy's network beyond 2, before tanh: there tanh has no gradient,
    and a policy that an untrained critic drives there would never come back.
    """

    _algorithm: ClassVar[str] = "DDPG"

    batch_size: int = 128
    hidden_sizes: tuple[int, ...] = (256, 128)
    actor_learning_rate: float = 5e-4
    saturation_penalty: float = 0.1
    exploration: Exploration | None = OrnsteinUhlenbeck()

    actor: Policy
    critic: Critic

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        weight = self.saturation_penalty
        fits = is_number(weight) and 0 <= weight < math.inf
        self._require(fits, "saturation_penalty", "a number of at least 0, and finite")

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """The same as `build` makes, for observations of floating point."""
        if self.observation_space.dtype == np.uint8:
            return None

        def networks() -> tuple[ArrayModule, ArrayModule]:
            actor, critic = self._array_mlp_of_actor(random), self._array_mlp_of_critic(random)
            for network in (actor, critic):
                _shrink_last_arrays(network, random)
            return self._array_actor(actor), self._array_critic(network=critic)

        actor, critic = networks()
        target_actor, target_critic = networks()
        copy_arrays(critic, to=target_critic)
        parts = self._array_parts(actor, critic, target_critic)
        self._add_target_actor(parts, target_actor)
        return parts

    def build(self) -> None:
        """Actor, critic, their targets, and Adam over the flat parameters of each."""
        from pearl.algorithms.networks import Critic, Policy

        def networks(*others: nn.Module) -> tuple[Policy, Critic]:
            actor, critic = self._made_network("build_actor", *others), self._made_network("build_critic", *others)
            _shrink_last_layer(actor)
            _shrink_last_layer(critic)
            policy = Policy(actor, *self._boxes, self.scale_observations)
            return policy.to(self.device), Critic(critic, *self._boxes, self.scale_observations).to(self.device)

        self.actor, self.critic = networks()
        self.target_actor, self.target_critic = networks(self.actor, self.critic)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
        self._make_optimizers()
        self._target_actor_flat = FlatParameters(self.target_actor, gradients=False)
        self._target_critic_flat = FlatParameters(self.target_critic, gradients=False)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Critic, then actor against the updated critic."""
        return (self._critic_phase, self._actor_phase)

    def _compute_critic(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        with torch.no_grad():
            next_value = self.target_critic(batch.next_obs, self.target_actor(batch.next_obs))
            target = torch.addcmul(batch.reward, batch.discount, next_value)
        error: torch.Tensor = self.critic(batch.obs, batch.action) - target
        torch.autograd.backward(torch.dot(error * error, weights) / batch_size)
        return error.detach().abs_()

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        unsquashed = self.actor.unsquashed(batch.obs)
        value = self.critic(batch.obs, self.actor.act(unsquashed))
        excess = functional.relu(unsquashed.abs() - _LINEAR_RANGE).square().sum()
        self._descend_actor((self.saturation_penalty * excess - value.sum()) / batch_size)

    def finish_step(self) -> None:
        """Polyak updates of both targets."""
        self._target_actor_flat.move_toward(self._actor_flat, self.tau)
        self._target_critic_flat.move_toward(self._critic_flat, self.tau)

    def update_rule(self) -> UpdateRule:
        """A critic whose targets take the target policy's action."""
        return dataclasses.replace(super().update_rule(), step=self._rule_step(), bootstrap="target_action")

    def _rule_step(self) -> RuleStep | str:
        departure = self._step_departure(DDPG, "Policy", "Critic")
        if departure is not None:
            return departure
        critic = self.parts.critic
        scales = critic.observation_scale, critic.action_scale
        return RuleStep("squared", self._rule_scalars, *self._rule_parameters(), *scales)

    def _rule_scalars(self) -> Scalars:
        return Scalars(float(self.max_grad_norm), float(self.tau), saturation_penalty=float(self.saturation_penalty))
