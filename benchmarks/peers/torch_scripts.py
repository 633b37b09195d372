"""Training steps as they are commonly written in plain torch, with fused Adam.

A script starts from the networks of a trainer; its `parameters` are those of the trained networks without targets.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pearl.algorithms import DDPG, DQN, SAC, TD3
from pearl.algorithms.networks import TwinCritic

Columns = dict[str, np.ndarray]
Noise = Callable[[int, int], torch.Tensor]  # (rows, number of the draw in the step) -> (rows, actions) standard normal


def plain(network: nn.Module) -> nn.Sequential:
    """A copy with the same layers, which shares no parameters."""
    assert isinstance(network, nn.Sequential)
    copied = nn.Sequential(*(copy.deepcopy(layer) for layer in network))
    for parameter in copied.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None
    return copied


class DqnScript:
    """Double DQN."""

    def __init__(self, trainer: DQN) -> None:
        self.q = plain(trainer.q)
        self.target = copy.deepcopy(self.q)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=trainer.learning_rate, fused=True)
        self.steps, self.interval, self.max_norm = 0, trainer.target_update_interval, trainer.max_grad_norm

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the online network."""
        return self.q.parameters()

    def step(self, columns: Columns, weights: np.ndarray) -> torch.Tensor:
        """One step; returns |TD error|."""
        obs, action, reward, next_obs, discount = (torch.from_numpy(column) for column in columns.values())
        with torch.no_grad():
            best = self.q(next_obs).argmax(dim=1, keepdim=True)
            target = reward + discount * self.target(next_obs).gather(1, best).squeeze(1)
        value = self.q(obs).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = (functional.smooth_l1_loss(value, target, reduction="none") * torch.from_numpy(weights)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), self.max_norm)
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.interval == 0:
            self.target.load_state_dict(self.q.state_dict())
        error: torch.Tensor = value.detach() - target
        return error.abs()


class ActorCriticScript:
    """DDPG (without a penalty for saturated actions), TD3, or SAC with a learned temperature.

    Observations and actions lie in [-1, 1]. `noise` replaces torch's own random numbers.
    """

    def __init__(self, trainer: DDPG | TD3 | SAC, noise: Noise | None = None) -> None:
        critic = trainer.critic
        self.actor = plain(trainer.actor.network)
        networks = (critic.first, critic.second) if isinstance(critic, TwinCritic) else (critic.network,)
        self.critics = nn.ModuleList(plain(network) for network in networks)
        self.target_critics = copy.deepcopy(self.critics)
        self.target_actor = None if isinstance(trainer, SAC) else copy.deepcopy(self.actor)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=trainer.actor_learning_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=trainer.learning_rate, fused=True)
        self.log_alpha: torch.Tensor | None = None
        if isinstance(trainer, SAC):
            self.log_alpha = torch.zeros((), requires_grad=True)
            rate = trainer.temperature_learning_rate
            self.temperature_optimizer = torch.optim.Adam([self.log_alpha], lr=rate, fused=True)
            self.log_std_bounds = trainer.log_std_bounds
        self.smoothing = (trainer.target_noise, trainer.noise_clip) if isinstance(trainer, TD3) else None
        self.delay = trainer.policy_delay if isinstance(trainer, TD3) else 1
        self.tau, self.actions, self.steps = trainer.tau, trainer.action_size, 0
        self.noise = noise or (lambda rows, draw: torch.randn(rows, self.actions))

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the actor and of the critics."""
        return itertools.chain(self.actor.parameters(), self.critics.parameters())

    def _sample(self, obs: torch.Tensor, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        log_std = log_std.clamp(*self.log_std_bounds)
        noise = self.noise(len(obs), draw)
        x = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - 2 * (math.log(2) - x - functional.softplus(-2 * x))
        return torch.tanh(x), log_prob.sum(dim=1)

    def _next_value(self, next_obs: torch.Tensor) -> torch.Tensor:
        if self.target_actor is None:
            assert self.log_alpha is not None
            action, log_prob = self._sample(next_obs, 0)
            return self._smaller(self.target_critics, next_obs, action) - self.log_alpha.exp() * log_prob
        action = torch.tanh(self.target_actor(next_obs))
        if self.smoothing is not None:
            scale, bound = self.smoothing
            action = (action + (scale * self.noise(len(next_obs), 0)).clamp(-bound, bound)).clamp(-1, 1)
        return self._smaller(self.target_critics, next_obs, action)

    def _smaller(self, critics: nn.ModuleList, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat((obs, action), dim=1)
        values = [critic(inputs).squeeze(1) for critic in critics]
        return values[0] if len(values) == 1 else torch.minimum(*values)

    def _move_actor(self, obs: torch.Tensor) -> None:
        if self.log_alpha is None:
            inputs = torch.cat((obs, torch.tanh(self.actor(obs))), dim=1)
            loss = -self.critics[0](inputs).mean()
        else:
            action, log_prob = self._sample(obs, 1)
            alpha = self.log_alpha.detach().exp()
            loss = (alpha * log_prob - self._smaller(self.critics, obs, action)).mean()
        self.actor_optimizer.zero_grad()
        loss.backward(inputs=list(self.actor.parameters()))  # the critics need no gradients
        self.actor_optimizer.step()
        if self.log_alpha is not None:
            temperature_loss = -self.log_alpha * (log_prob.detach() - self.actions).mean()
            self.temperature_optimizer.zero_grad()
            temperature_loss.backward()
            self.temperature_optimizer.step()

    def step(self, columns: Columns, weights: np.ndarray) -> torch.Tensor:
        """One step; returns the larger |TD error| of the critics."""
        obs, action, reward, next_obs, discount = (torch.from_numpy(column) for column in columns.values())
        with torch.no_grad():
            target = reward + discount * self._next_value(next_obs)
        inputs = torch.cat((obs, action), dim=1)
        errors = torch.stack([critic(inputs).squeeze(1) for critic in self.critics]) - target
        loss = (errors**2 * torch.from_numpy(weights)).sum(dim=0).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        self.steps += 1
        if self.steps % self.delay == 0:
            self._move_actor(obs)
            moved: list[tuple[nn.Module, nn.Module]] = [(self.critics, self.target_critics)]
            if self.target_actor is not None:
                moved.append((self.actor, self.target_actor))
            with torch.no_grad():
                for online, targets in moved:
                    for parameter, moving in zip(online.parameters(), targets.parameters(), strict=True):
                        moving.lerp_(parameter, self.tau)
        return errors.detach().abs().amax(dim=0)


Script = DqnScript | ActorCriticScript
