"""Networks that the built-in algorithms use when the user brings none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from pearl import _native
from pearl.algorithms.inputs import (
    SMALLEST_IMAGES,
    impala_features,
    nature_features,
    scaled_observations,
    takes_cnn,
    unit_scale,
)

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


class ResidualBlock(nn.Module):
    """`x + block(x)` for images of `channels`; the block is ReLU, convolution, ReLU, convolution (3 x 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images `(batch, channels, height, width)`."""
        found: torch.Tensor = x + self.block(x)
        return found


class ImpalaCNN(nn.Sequential):
    """The large network of Espeholt et al. 2018 (IMPALA, Fig. 3, right) without its LSTM.

    From `(batch, channels, height, width)` to `(batch, features)`: three stages of 16, 32 and 32 channels, each of one
    convolution, one max-pooling of stride 2 and two residual blocks. Images of unsigned bytes are scaled to [0, 1]
    inside.
    """

    stages = (16, 32, 32)

    def __init__(self, in_shape: tuple[int, ...], features: int = 256) -> None:
        channels, height, width = in_shape
        least = SMALLEST_IMAGES["impala"]
        if min(height, width) < least:
            raise ValueError(
                f"The IMPALA CNN needs images (channels, height, width) of at least {least} x {least} pixels; found "
                f"{in_shape}."
            )
        layers: list[nn.Module] = [ScaleBytes()]
        for size in self.stages:
            layers += [nn.Conv2d(channels, size, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
            layers += [ResidualBlock(size), ResidualBlock(size)]
            channels = size
        width = channels * impala_features(height) * impala_features(width)
        super().__init__(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(width, features), nn.ReLU())
        self.features = features


CNNS: dict[str, type[NatureCNN | ImpalaCNN]] = {"nature": NatureCNN, "impala": ImpalaCNN}


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


class ObservationParts(nn.Module):
    """The parts of `Dict` and `Tuple` observations, which trainers get in a row, for networks of their own.

    From `(batch, numbers)` to a dictionary or tuple as the environment's own `space` has it, of tensors
    `(batch, *part)`: `Box` and `MultiBinary` in their shapes, `Discrete` and `MultiDiscrete` as one-hot vectors in a
    row, all in the dtype of the row.

    Raises TypeError for a space that Gymnasium cannot flatten to a fixed size, ValueError for rows of another length.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        if not space.is_np_flattenable:
            raise TypeError(f"ObservationParts needs a space of a fixed size, such as a Dict of Boxes; found {space}.")
        self.space, self.numbers = space, spaces.flatdim(space)

    def forward(self, x: torch.Tensor) -> Any:
        """Split rows `(batch, numbers)`."""
        if x.ndim != 2 or x.shape[1] != self.numbers:
            raise ValueError(
                f"ObservationParts of {self.space} takes rows (batch, {self.numbers}); found {tuple(x.shape)}. Give it "
                "the environment's own observation space."
            )
        return _parts(self.space, x)


def _parts(space: gym.Space[Any], rows: torch.Tensor) -> Any:
    inside: Sequence[gym.Space[Any]]
    if isinstance(space, spaces.Dict):
        inside = list(space.spaces.values())
    elif isinstance(space, spaces.Tuple):
        inside = space.spaces
    else:
        shape = space.shape if isinstance(space, spaces.Box | spaces.MultiBinary) else None
        return rows if shape is None else rows.reshape(-1, *shape)
    pieces = torch.split(rows, [spaces.flatdim(part) for part in inside], dim=1)
    found = [_parts(part, piece) for part, piece in zip(inside, pieces, strict=True)]
    return dict(zip(space.spaces, found, strict=True)) if isinstance(space, spaces.Dict) else tuple(found)


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
    obs_shape: tuple[int, ...],
    actions: int,
    hidden_sizes: Sequence[int],
    *,
    dueling: bool,
    of_bytes: bool = False,
    cnn: str = "nature",
    layer_norm: bool = False,
) -> nn.Sequential:
    """Action-value network: `CNNS[cnn]` for images `(channels, height, width)`, else an MLP over flat observations.

    An MLP `of_bytes` scales them to [0, 1] first, as the CNNs do. With `layer_norm`, the MLP's hidden layers are
    normalised (Ba et al. 2016) before their ReLU, but for the streams of a dueling head.
    """
    if takes_cnn(obs_shape, cnn):
        made = CNNS[cnn](obs_shape)
        trunk: list[nn.Module] = [made]
        width = made.features
    else:
        trunk = [ScaleBytes()] if of_bytes else []
        trunk += [nn.Flatten()] if len(obs_shape) != 1 else []
        width = math.prod(obs_shape)
        for size in hidden_sizes[:-1] if dueling else hidden_sizes:
            trunk += [nn.Linear(width, size), *([nn.LayerNorm(size)] if layer_norm else []), nn.ReLU()]
            width = size
    head = DuelingHead(width, actions, hidden_sizes[-1]) if dueling else nn.Linear(width, actions)
    return nn.Sequential(*trunk, head)


class ToUnit(nn.Module):
    """Maps `[low, high]` to [-1, 1], element by element, `(batch, size)`; identity where `scaled` is False.

    `scaled` is `(size,)` bool; by default, all elements are scaled, and equal bounds become 0.
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


class _Critics(nn.Module):
    """Several critics of the same pairs of observations and actions, which share the scaling of their inputs."""

    def __init__(self, observations: spaces.Box, actions: spaces.Box, scale_observations: bool = False) -> None:
        super().__init__()
        self.observation_scale = ToUnit(observations, scaled_observations(observations, scale_observations))
        self.action_scale = ToUnit(actions)

    @property
    def networks(self) -> Sequence[nn.Module]:
        """The critics, in order."""
        raise NotImplementedError

    def inputs(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Inputs of all networks for observations `(batch, *obs)` and unit-scale actions `(batch, action size)`."""
        return torch.cat((self.observation_scale(obs.flatten(1)), unit), dim=1)

    def of_unit(
        self, obs: torch.Tensor, unit: torch.Tensor, which: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The values `(batch,)` of actions in unit scale `(batch, action size)`, by all or those in `which`."""
        inputs, networks = self.inputs(obs, unit), self.networks
        chosen = networks if which is None else [networks[number] for number in which]
        return tuple(network(inputs).squeeze(1) for network in chosen)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The values `(batch,)` of actions `(batch, *action)` in the environment's units, by each critic."""
        return self.of_unit(obs, self.action_scale(action.flatten(1)))


class TwinCritic(_Critics):
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
        super().__init__(observations, actions, scale_observations)
        self.first, self.second = first, second

    @property
    def networks(self) -> Sequence[nn.Module]:
        """Both critics."""
        return self.first, self.second


class EnsembleCritic(_Critics):
    """Any number of critics of the same pairs (Chen et al. 2021): the networks `critics`, as `TwinCritic` has two."""

    def __init__(
        self,
        critics: Sequence[nn.Module],
        observations: spaces.Box,
        actions: spaces.Box,
        scale_observations: bool = False,
    ) -> None:
        super().__init__(observations, actions, scale_observations)
        self.critics = nn.ModuleList(critics)

    @property
    def networks(self) -> Sequence[nn.Module]:
        """The critics, in order."""
        return list(self.critics)


class DropoutDraw:
    """The random numbers of the dropout layers of several networks: `begin` a pass, or `end` it to drop nothing."""

    def __init__(self) -> None:
        self._pass: tuple[int, int, int, int] | None = None

    def begin(self, seed: int, step: int, number: int, first: int) -> None:
        """From now on, drop by the masks of pass `number` (0 to 255) of a step, from row `first` of its batch on."""
        self._pass = seed, step, number, first

    def end(self) -> None:
        """From now on, drop nothing."""
        self._pass = None

    def mask(self, layer: int, rate: float, like: torch.Tensor) -> torch.Tensor | None:
        """Factors `(rows, width)`, 0 or 1 / (1 - rate), of a layer; None where nothing is dropped."""
        if self._pass is None or rate == 0.0:
            return None
        seed, step, number, first = self._pass
        rows, width = like.shape
        mask = _native.dropout_mask(seed, step, number << 16 | layer, first, rows, width, rate)
        return torch.from_numpy(mask).to(like.device)


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) of `(batch, width)` with masks that all engines draw alike.

    A number is dropped as a function of the seed, the step, the pass, the layer, its row and its column alone, so that
    checkpoints need no generator and sub-batches drop what the whole batch does. `of` gives the layer its random
    numbers and its place, critic * 256 + number; without it, and in evaluation mode, nothing is dropped.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._draw: DropoutDraw | None = None
        self._layer = 0

    def of(self, draw: DropoutDraw, layer: int) -> None:
        """Drop by the random numbers of `draw`, as `layer`."""
        self._draw, self._layer = draw, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with some of its numbers 0 and the others larger."""
        mask = self._draw.mask(self._layer, self.rate, x) if self._draw is not None and self.training else None
        return x if mask is None else x * mask


def dropout_mlp(inputs: int, hidden_sizes: Sequence[int], outputs: int, rate: float) -> nn.Sequential:
    """A multi-layer perceptron whose layers are linear, dropout, layer normalisation, ReLU (Hiraoka et al. 2022)."""
    layers: list[nn.Module] = []
    width = inputs
    for size in hidden_sizes:
        layers += [nn.Linear(width, size), Dropout(rate), nn.LayerNorm(size), nn.ReLU()]
        width = size
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe 2017, arXiv:1702.03275) of `(batch, width)`.

    In training mode, `y = (x - mean) / std * r + d` with the batch's mean and deviation, where
    `r = clip(std / running std, 1 / r_max, r_max)` and `d = clip((mean - running mean) / running std, -d_max, d_max)`
    have no gradient. It is plain batch normalisation (r = 1, d = 0) for the first `warmup_steps` batches, until the
    running statistics fit. In evaluation mode, it normalises by these. They are buffers that are changed in place: so
    they are part of checkpoints, and of the weights that actors receive.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    batches: torch.Tensor

    def __init__(
        self,
        width: int,
        *,
        momentum: float = 0.99,
        eps: float = 1e-3,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 100_000,
    ) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self._rise, self._eps, self._r_max, self._d_max = 1.0 - momentum, eps, r_max, d_max
        self._warmup = warmup_steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise; in training mode, also move the running statistics toward the batch's."""
        if not self.training:
            return (x - self.mean) * ((self.variance + self._eps).rsqrt() * self.weight) + self.bias
        variance, mean = torch.var_mean(x, dim=0, correction=0)
        deviation = (variance + self._eps).sqrt()
        with torch.no_grad():
            running = (self.variance + self._eps).sqrt()
            warm = self.batches >= self._warmup
            r = torch.where(warm, (deviation / running).clamp(1.0 / self._r_max, self._r_max), 1.0)
            d = torch.where(warm, ((mean - self.mean) / running).clamp(-self._d_max, self._d_max), 0.0)
            self.mean.lerp_(mean.detach(), self._rise)
            self.variance.lerp_(variance.detach(), self._rise)
            self.batches += 1
        return ((x - mean) / deviation * r + d) * self.weight + self.bias


def renormalized_mlp(
    inputs: int, hidden_sizes: Sequence[int], outputs: int, *, momentum: float, warmup_steps: int
) -> nn.Sequential:
    """A ReLU multi-layer perceptron that renormalises its inputs and what each ReLU gives (Bhatt et al. 2024)."""
    layers: list[nn.Module] = [BatchRenorm(inputs, momentum=momentum, warmup_steps=warmup_steps)]
    width = inputs
    for size in hidden_sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        layers += [BatchRenorm(size, momentum=momentum, warmup_steps=warmup_steps)]
        width = size
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)
