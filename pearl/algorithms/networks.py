"""Networks that the built-in algorithms use when the user brings none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from pearl.errors import TrainerError

_WIDEST = 1e3  # wider observation bounds say nothing about the values


def mlp(inputs: int, hidden_sizes: Sequence[int], outputs: int) -> nn.Sequential:
    """A ReLU multi-layer perceptron from `(batch, inputs)` to `(batch, outputs)`."""
    layers: list[nn.Module] = []
    width = inputs
    for size in hidden_sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)


def nature_features(pixels: int) -> int:
    """Output positions of the Nature CNN's convolutions for a height or width in pixels; below 1: it is too small."""
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        pixels = (pixels - kernel) // stride + 1
    return pixels


def _is_image(channels: int, height: int, width: int) -> bool:
    return channels <= min(height, width) and min(nature_features(height), nature_features(width)) >= 1


def takes_cnn(obs_shape: tuple[int, ...]) -> bool:
    """Whether observations of that shape are images `(channels, height, width)` that the Nature CNN takes.

    Raises TrainerError for images with the channels last, from which an MLP would learn almost nothing.
    """
    if len(obs_shape) != 3:
        return False
    height, width, channels = obs_shape
    if _is_image(*obs_shape) or not _is_image(channels, height, width):
        return _is_image(*obs_shape)
    raise TrainerError(
        f"Observations of shape {obs_shape} look like images (height, width, channels); the Nature CNN needs "
        "(channels, height, width). Wrap the environment: gymnasium.wrappers.GrayscaleObservation, "
        "ResizeObservation((84, 84)) and FrameStackObservation(4). Or use your own network."
    )


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


def scaled_observations(box: spaces.Box, asked: bool) -> np.ndarray:
    """Which elements of an observation the networks of an actor-critic scale by their bounds, `(size,)` bool.

    Of unsigned bytes, and of others if the user `asked` for it, all elements with bounds of at most 1000.
    """
    low, high = box.low.astype(np.float64).ravel(), box.high.astype(np.float64).ravel()
    fit: np.ndarray = (low >= -_WIDEST) & (high <= _WIDEST) & (high > low)
    return fit & (asked or box.dtype == np.uint8)


class ToUnit(nn.Module):
    """Maps `[low, high]` to [-1, 1], element by element, `(batch, size)`; identity where `scaled` is False.

    `scaled` is `(size,)` bool; by default, all elements with different bounds are scaled.
    """

    center: torch.Tensor
    half_range: torch.Tensor

    def __init__(self, box: spaces.Box, scaled: np.ndarray | None = None) -> None:
        super().__init__()
        low, high = torch.as_tensor(box.low).double().flatten(), torch.as_tensor(box.high).double().flatten()
        chosen = high > low if scaled is None else torch.from_numpy(scaled)
        one = torch.ones_like(low)
        self.register_buffer("center", torch.where(chosen, (high + low) / 2, 0 * one).float())
        self.register_buffer("half_range", torch.where(chosen, (high - low) / 2, one).float())

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
