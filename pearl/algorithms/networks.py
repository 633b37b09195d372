"""Networks that the built-in algorithms use when the user brings none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from pearl.algorithms.inputs import nature_features, scaled_observations, takes_cnn, unit_scale

_LOG_2 = math.log(2.0)
_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def mlp(inputs: int, hidden_sizes: Sequence[int], outputs: int) -> nn.Sequential:
    """A ReLU multi-layer perceptron from `(batch, inputs)` to `(batch, outputs)`."""
    layers: list[nn.Module] = []
    width = inputs
    for size in hidden_sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)


class NatureCNN(nn.Sequential):
    """The convolutional trunk of Mnih et al. 2015, from `(batch, channels, height, width)` to `(batch, features)`.

    Images of unsigned bytes are scaled to [0, 1] inside.
    """

    def __init__(self, in_shape: tuple[int, ...], features: int = 512) -> None:
        channels, height, width = in_shape
        if nature_features(height) < 1 or nature_features(width) < 1:
            raise ValueError(
                f"The Nature CNN needs images (channels, height, width) of at least 36 x 36 pixels; found {in_shape}."
            )
        super().__init__(
            ScaleBytes(),
            nn.Conv2d(channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * nature_features(height) * nature_features(width), features),
            nn.ReLU(),
        )
        self.features = features


class ScaleBytes(nn.Module):
    """Unsigned bytes to float32 in [0, 1]; float32 keeps its values.

    On a CPU, images `(batch, channels, height, width)` are returned in the memory format `torch.channels_last`, which
    makes the following convolutions faster: the Nature CNN's backward pass by a quarter. Their weights need not have
    that format.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale `(batch, *shape)`."""
        if x.ndim == 4 and x.device.type == "cpu":
            # Half the time of `contiguous(memory_format=...)`. Before `float()`: on floats it takes four times as long.
            x = torch.stack(x.unbind(1), dim=-1).permute(0, 3, 1, 2)
        return x.float().div_(255.0) if x.dtype == torch.uint8 else x


class DuelingHead(nn.Module):
    """Wang et al. 2016: `value + advantage - mean(advantage)`, from `(batch, inputs)` to `(batch, actions)`."""

    def __init__(self, inputs: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.value = mlp(inputs, (hidden,), 1)
        self.advantage = mlp(inputs, (hidden,), actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Action values of features `x`."""
        value: torch.Tensor = self.value(x)
        advantage: torch.Tensor = self.advantage(x)
        return value + advantage - advantage.mean(dim=1, keepdim=True)


def q_network(
    obs_shape: tuple[int, ...], actions: int, hidden_sizes: Sequence[int], *, dueling: bool, of_bytes: bool = False
) -> nn.Sequential:
    """Action-value network: Nature CNN for images `(channels, height, width)`, else an MLP over flat observations.

    An MLP `of_bytes` scales them to [0, 1] first, as the Nature CNN does.
    """
    if takes_cnn(obs_shape):
        trunk: list[nn.Module] = [NatureCNN(obs_shape)]
        width = 512
    else:
        trunk = [ScaleBytes()] if of_bytes else []
        trunk += [nn.Flatten()] if len(obs_shape) != 1 else []
        width = math.prod(obs_shape)
        for size in hidden_sizes[:-1] if dueling else hidden_sizes:
            trunk += [nn.Linear(width, size), nn.ReLU()]
            width = size
    head = DuelingHead(width, actions, hidden_sizes[-1]) if dueling else nn.Linear(width, actions)
    return nn.Sequential(*trunk, head)


class ToUnit(nn.Module):
    """Maps `[low, high]` to [-1, 1], element by element, `(batch, size)`; identity where `scaled` is False.

    `scaled` is `(size,)` bool; by default, all elements with different bounds are scaled.
    """

    center: torch.Tensor
    half_range: torch.Tensor

    def __init__(self, box: spaces.Box, scaled: np.ndarray | None = None) -> None:
        super().__init__()
        center, half_range = unit_scale(box, scaled)
        self.register_buffer("center", torch.from_numpy(center))
        self.register_buffer("half_range", torch.from_numpy(half_range))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale `(batch, size)`."""
        return (x - self.center) / self.half_range


class FromUnit(ToUnit):
    """The inverse of `ToUnit`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale `(batch, size)` from [-1, 1]."""
        return self.center + self.half_range * x


class Policy(nn.Module):
    """Actions `(batch, *action)` in their bounds for observations `(batch, *obs)`: `tanh(network)`, rescaled.

    With `scale_observations`, the network takes observations scaled as `scaled_observations` says.
    """

    def __init__(
        self, network: nn.Module, observations: spaces.Box, actions: spaces.Box, scale_observations: bool = False
    ) -> None:
        super().__init__()
        self.observation_scale = ToUnit(observations, scaled_observations(observations, scale_observations))
        self.network = network
        self.squash, self.action_scale = nn.Tanh(), FromUnit(actions)
        self._shape = actions.shape

    def unsquashed(self, obs: torch.Tensor) -> torch.Tensor:
        """The network's outputs before tanh, `(batch, action size)`."""
        found: torch.Tensor = self.network(self.observation_scale(obs.flatten(1)))
        return found

    def unit(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions in unit scale, `(batch, action size)` within [-1, 1]."""
        found: torch.Tensor = self.squash(self.unsquashed(obs))
        return found

    def act(self, unsquashed: torch.Tensor) -> torch.Tensor:
        """Actions of `unsquashed`'s outputs."""
        actions: torch.Tensor = self.action_scale(self.squash(unsquashed))
        return actions if len(self._shape) == 1 else actions.view(-1, *self._shape)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions of observations."""
        return self.act(self.unsquashed(obs))


class GaussianPolicy(Policy):
    """`tanh` of a normal distribution whose mean and log standard deviation are `network`'s two halves.

    Called, it acts by the mean. `network` goes from `(batch, observation size)` to `(batch, 2 * action size)`;
    `log_std_bounds` clamp its second half.
    """

    def __init__(
        self,
        network: nn.Module,
        observations: spaces.Box,
        actions: spaces.Box,
        scale_observations: bool = False,
        log_std_bounds: tuple[float, float] = (-20.0, 2.0),
    ) -> None:
        super().__init__(network, observations, actions, scale_observations)
        self._log_std_bounds = log_std_bounds
        self._size = math.prod(actions.shape)

    def normal(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log standard deviation before tanh, `(batch, action size)` each."""
        outputs = super().unsquashed(obs)
        return outputs[:, : self._size], outputs[:, self._size :].clamp(*self._log_std_bounds)

    def unsquashed(self, obs: torch.Tensor) -> torch.Tensor:
        """The mean before tanh, `(batch, action size)`."""
        return super().unsquashed(obs)[:, : self._size]

    def sample(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit-scale actions `(batch, action size)` from standard normal `noise`, and their log density `(batch,)`."""
        mean, log_std = self.normal(obs)
        unsquashed = mean + log_std.exp() * noise
        # log(1 - tanh(x)^2), without cancellation, which would give log(0) from |x| = 9 on.
        log_slope = 2.0 * (_LOG_2 - unsquashed - functional.softplus(-2.0 * unsquashed))
        log_prob = -(0.5 * noise * noise + log_std + _HALF_LOG_2_PI + log_slope).sum(dim=1)
        return self.squash(unsquashed), log_prob


class Critic(nn.Module):
    """Action values `(batch,)` of observations and actions, through `network`, which takes actions in unit scale.

    With `scale_observations`, it takes observations scaled as `scaled_observations` says.
    """

    def __init__(
        self, network: nn.Module, observations: spaces.Box, actions: spaces.Box, scale_observations: bool = False
    ) -> None:
        super().__init__()
        self.observation_scale = ToUnit(observations, scaled_observations(observations, scale_observations))
        self.action_scale = ToUnit(actions)
        self.network = network

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Values of `(obs, action)` pairs."""
        inputs = torch.cat((self.observation_scale(obs.flatten(1)), self.action_scale(action.flatten(1))), dim=1)
        values: torch.Tensor = self.network(inputs)
        return values.squeeze(1)


class TwinCritic(nn.Module):
    """Two critics of the same pairs (Fujimoto et al. 2018), whose smaller value is less prone to overestimate.

    `first` and `second` are networks from `(batch, observation size + action size)` to `(batch, 1)`, which take actions
    in unit scale. With `scale_observations`, they take observations scaled as `scaled_observations` says.
    """

    def __init__(
        self,
        first: nn.Module,
        second: nn.Module,
        observations: spaces.Box,
        actions: spaces.Box,
        scale_observations: bool = False,
    ) -> None:
        super().__init__()
        self.observation_scale = ToUnit(observations, scaled_observations(observations, scale_observations))
        self.action_scale = ToUnit(actions)
        self.first, self.second = first, second

    def inputs(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Inputs of both networks for observations `(batch, *obs)` and unit-scale actions `(batch, action size)`."""
        return torch.cat((self.observation_scale(obs.flatten(1)), unit), dim=1)

    def of_unit(self, obs: torch.Tensor, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both values `(batch,)` of actions in unit scale `(batch, action size)`."""
        inputs = self.inputs(obs, unit)
        return self.first(inputs).squeeze(1), self.second(inputs).squeeze(1)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both values `(batch,)` of actions `(batch, *action)` in the environment's units."""
        return self.of_unit(obs, self.action_scale(action.flatten(1)))
