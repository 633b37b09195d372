"""Deep deterministic policy gradient: Lillicrap et al. 2016."""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import nn

from pearl.actors.exploration import Exploration, OrnsteinUhlenbeck
from pearl.algorithms.batch import Batch
from pearl.algorithms.networks import mlp
from pearl.algorithms.trainer import Phase, Trainer, observation_size
from pearl.errors import EnvError
from pearl.learner.flat import FlatParameters


class ScaledPolicy(nn.Module):
    """`center + half_range * tanh(network(obs))`: actions inside the Box, `(batch, *action)`."""

    center: torch.Tensor
    half_range: torch.Tensor

    def __init__(self, network: nn.Module, low: torch.Tensor, high: torch.Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("half_range", (high - low) / 2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions of observations `(batch, *obs)`."""
        squashed = self.network(obs.flatten(1)).view(-1, *self.center.shape)
        return self.center + self.half_range * squashed


class ScaledCritic(nn.Module):
    """Action value `(batch,)` from observations and actions, the latter scaled to [-1, 1]."""

    center: torch.Tensor
    half_range: torch.Tensor

    def __init__(self, network: nn.Module, low: torch.Tensor, high: torch.Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("half_range", (high - low) / 2)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Values of `(obs, action)` pairs."""
        scaled = (action - self.center) / self.half_range
        return self.network(torch.cat((obs.flatten(1), scaled.flatten(1)), dim=1)).squeeze(1)


class DDPG(Trainer):
    """DDPG for bounded continuous actions. Networks default to the paper's hidden sizes (256, 128), Table III."""

    batch_size: int = 128
    hidden_sizes: tuple[int, ...] = (256, 128)
    learning_rate: float = 1e-3
    actor_learning_rate: float = 5e-4
    tau: float = 0.005
    max_grad_norm: float = 0.0
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
                "Wrap it with gymnasium.wrappers.RescaleAction or ClipAction."
            )
        if not isinstance(self.observation_space, spaces.Box):
            raise EnvError(
                f"{type(self).__name__} needs Box observations; the environment has {self.observation_space}. "
                "Wrap it, for example with gymnasium.wrappers.FlattenObservation."
            )

    def build_actor(self) -> nn.Module:
        """A network from `(batch, observation size)` to `(batch, action size)` in [-1, 1]."""
        actions = observation_size(self.action_space)
        return mlp(observation_size(self.observation_space), self.hidden_sizes, actions, output=nn.Tanh)

    def build_critic(self) -> nn.Module:
        """A network from `(batch, observation size + action size)` to `(batch, 1)`."""
        inputs = observation_size(self.observation_space) + observation_size(self.action_space)
        return mlp(inputs, self.hidden_sizes, 1)

    def build(self) -> None:
        """Actor, critic, their targets, and Adam over the flat parameters of each."""
        box = self.action_space
        assert isinstance(box, spaces.Box)
        low, high = torch.as_tensor(box.low).float(), torch.as_tensor(box.high).float()
        self.actor = ScaledPolicy(self.build_actor(), low, high).to(self.device)
        self.critic = ScaledCritic(self.build_critic(), low, high).to(self.device)
        self.target_actor = ScaledPolicy(self.build_actor(), low, high).to(self.device)
        self.target_critic = ScaledCritic(self.build_critic(), low, high).to(self.device)
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
        return self.actor(obs)

    def _compute_critic(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        with torch.no_grad():
            next_value = self.target_critic(batch.next_obs, self.target_actor(batch.next_obs))
            target = torch.addcmul(batch.reward, batch.discount, next_value)
        error = self.critic(batch.obs, batch.action) - target
        torch.autograd.backward(torch.dot(error * error, weights) / batch_size)
        return error.detach().abs_()

    def _apply_critic(self) -> None:
        self._step(self._critic_flat, self.critic_optimizer)

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        value = self.critic(batch.obs, self.actor(batch.obs))
        torch.autograd.backward(-value.sum() / batch_size)

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
