"""Deep deterministic policy gradient: Lillicrap et al. 2016."""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from pearl.actors.exploration import Exploration, OrnsteinUhlenbeck
from pearl.algorithms.batch import Batch
from pearl.algorithms.networks import mlp
from pearl.algorithms.trainer import Phase, Trainer, observation_size
from pearl.errors import EnvError
from pearl.learner.flat import FlatParameters

_WIDEST = 1e3  # observation bounds beyond this are no scale to go by (CartPole's velocities: 3e38)
_LINEAR_RANGE = 2.0  # tanh(2) = 0.96
_FINAL_RANGE = 3e-3  # of the last layers' initial weights (Lillicrap et al. 2016, Sec. 7): actions start unsaturated


class ToUnit(nn.Module):
    """Maps `[low, high]` to [-1, 1], element by element, `(batch, size)`; where bounds exceed `widest`, identity."""

    center: torch.Tensor
    half_range: torch.Tensor

    def __init__(self, box: spaces.Box, widest: float = math.inf) -> None:
        super().__init__()
        low, high = torch.as_tensor(box.low).double().flatten(), torch.as_tensor(box.high).double().flatten()
        scaled = (low >= -widest) & (high <= widest) & (high > low)
        one = torch.ones_like(low)
        self.register_buffer("center", torch.where(scaled, (high + low) / 2, 0 * one).float())
        self.register_buffer("half_range", torch.where(scaled, (high - low) / 2, one).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale `(batch, size)`."""
        return (x - self.center) / self.half_range


class FromUnit(ToUnit):
    """The inverse of `ToUnit`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale `(batch, size)` from [-1, 1]."""
        return self.center + self.half_range * x


class Policy(nn.Module):
    """Actions `(batch, *action)` in their bounds for observations `(batch, *obs)`: `tanh(network)`, rescaled."""

    def __init__(self, network: nn.Module, observations: spaces.Box, actions: spaces.Box) -> None:
        super().__init__()
        self.observation_scale, self.network = ToUnit(observations, _WIDEST), network
        self.squash, self.action_scale = nn.Tanh(), FromUnit(actions)
        self._shape = actions.shape

    def unsquashed(self, obs: torch.Tensor) -> torch.Tensor:
        """What the network says before tanh, `(batch, action size)`."""
        found: torch.Tensor = self.network(self.observation_scale(obs.flatten(1)))
        return found

    def act(self, unsquashed: torch.Tensor) -> torch.Tensor:
        """Actions of `unsquashed`'s outputs."""
        actions: torch.Tensor = self.action_scale(self.squash(unsquashed))
        return actions if len(self._shape) == 1 else actions.view(-1, *self._shape)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions of observations."""
        return self.act(self.unsquashed(obs))


class Critic(nn.Module):
    """Action values `(batch,)` of observations and actions, through `network` in unit scale."""

    def __init__(self, network: nn.Module, observations: spaces.Box, actions: spaces.Box) -> None:
        super().__init__()
        self.observation_scale, self.action_scale = ToUnit(observations, _WIDEST), ToUnit(actions)
        self.network = network

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Values of `(obs, action)` pairs."""
        inputs = torch.cat((self.observation_scale(obs.flatten(1)), self.action_scale(action.flatten(1))), dim=1)
        values: torch.Tensor = self.network(inputs)
        return values.squeeze(1)


def _shrink_last_layer(network: nn.Module) -> None:
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if linear:
        for parameter in linear[-1].parameters():
            nn.init.uniform_(parameter, -_FINAL_RANGE, _FINAL_RANGE)


class DDPG(Trainer):
    """DDPG for bounded continuous actions. Networks default to the paper's hidden sizes (256, 128), Table III.

    Inside the networks, observations and actions are scaled to [-1, 1] by their spaces' bounds. `saturation_penalty`
    weighs how far the policy's outputs before tanh exceed 2: beyond, tanh passes no gradient, and a policy driven there
    by a young critic would never come back.
    """

    batch_size: int = 128
    hidden_sizes: tuple[int, ...] = (256, 128)
    learning_rate: float = 1e-3
    actor_learning_rate: float = 5e-4
    tau: float = 0.005
    max_grad_norm: float = 0.0
    saturation_penalty: float = 0.1
    exploration: Exploration | None = OrnsteinUhlenbeck()

    def check_spaces(self) -> None:
        """A bounded Box of actions and array observations."""
        box = self.action_space
        if not isinstance(box, spaces.Box):
            raise EnvError(
                f"{type(self).__name__} is a DDPG and needs a Box action space; the environment has {box}. "
                "For discrete actions derive from pearl.algorithms.DQN."
            )
        if not box.is_bounded("both"):
            raise EnvError(
                f"{type(self).__name__} needs bounded actions; the environment has {box}. "
                "Give its action space finite bounds, for example with a gymnasium.ActionWrapper that states them."
            )
        if not isinstance(self.observation_space, spaces.Box):
            raise EnvError(
                f"{type(self).__name__} needs Box observations; the environment has {self.observation_space}. "
                "Wrap it, for example with gymnasium.wrappers.FlattenObservation."
            )

    def build_actor(self) -> nn.Module:
        """A network from `(batch, observation size)` to `(batch, action size)`, which `tanh` then bounds."""
        return mlp(observation_size(self.observation_space), self.hidden_sizes, observation_size(self.action_space))

    def build_critic(self) -> nn.Module:
        """A network from `(batch, observation size + action size)` to `(batch, 1)`."""
        inputs = observation_size(self.observation_space) + observation_size(self.action_space)
        return mlp(inputs, self.hidden_sizes, 1)

    def build(self) -> None:
        """Actor, critic, their targets, and Adam over the flat parameters of each."""
        observations, actions = self.observation_space, self.action_space
        assert isinstance(observations, spaces.Box)
        assert isinstance(actions, spaces.Box)

        def networks() -> tuple[Policy, Critic]:
            actor, critic = self.build_actor(), self.build_critic()
            _shrink_last_layer(actor)
            _shrink_last_layer(critic)
            policy = Policy(actor, observations, actions).to(self.device)
            return policy, Critic(critic, observations, actions).to(self.device)

        self.actor, self.critic = networks()
        self.target_actor, self.target_critic = networks()
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
        self._actor_flat = FlatParameters(self.actor)
        self._critic_flat = FlatParameters(self.critic)
        self._target_actor_flat = FlatParameters(self.target_actor, gradients=False)
        self._target_critic_flat = FlatParameters(self.target_critic, gradients=False)
        self.actor_optimizer = torch.optim.Adam([self._actor_flat.parameter], lr=self.actor_learning_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam([self._critic_flat.parameter], lr=self.learning_rate, fused=True)

    @property
    def policy(self) -> nn.Module:
        """The actor."""
        return self.actor

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Critic, then actor against the updated critic."""
        return (
            Phase("critic", self._compute_critic, self._apply_critic),
            Phase("actor", self._compute_actor, self._apply_actor),
        )

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        """The policy's actions `(envs, *action)` float32, in the environment's units."""
        actions: torch.Tensor = self.actor(obs)
        return actions

    def _compute_critic(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        with torch.no_grad():
            next_value = self.target_critic(batch.next_obs, self.target_actor(batch.next_obs))
            target = torch.addcmul(batch.reward, batch.discount, next_value)
        error: torch.Tensor = self.critic(batch.obs, batch.action) - target
        torch.autograd.backward(torch.dot(error * error, weights) / batch_size)
        return error.detach().abs_()

    def _apply_critic(self) -> None:
        self._step(self._critic_flat, self.critic_optimizer)

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        unsquashed = self.actor.unsquashed(batch.obs)
        value = self.critic(batch.obs, self.actor.act(unsquashed))
        excess = functional.relu(unsquashed.abs() - _LINEAR_RANGE).square().sum()
        torch.autograd.backward((self.saturation_penalty * excess - value.sum()) / batch_size)

    def _apply_actor(self) -> None:
        self._step(self._actor_flat, self.actor_optimizer)
        # The policy gradient also flowed into the critic, whose weights it must not move.
        self._critic_flat.zero_grad()

    def _step(self, flat: FlatParameters, optimizer: torch.optim.Optimizer) -> None:
        if self.max_grad_norm > 0:
            nn.utils.clip_grad_norm_([flat.parameter], self.max_grad_norm)
        optimizer.step()
        flat.zero_grad()

    def finish_step(self) -> None:
        """Polyak updates of both targets."""
        self._target_actor_flat.move_toward(self._actor_flat, self.tau)
        self._target_critic_flat.move_toward(self._critic_flat, self.tau)
