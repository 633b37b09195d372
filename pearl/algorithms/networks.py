"""Networks that the built-in algorithms use when the user brings none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


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
        if channels > min(height, width):
            raise ValueError(
                f"The Nature CNN needs images as (channels, height, width); found {in_shape}. Wrap the environment: "
                "gymnasium.wrappers.GrayscaleObservation, ResizeObservation((84, 84)) and FrameStackObservation(4)."
            )
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if height < 1 or width < 1:
            raise ValueError(f"The Nature CNN needs images of at least 36 x 36 pixels; found {in_shape}.")
        super().__init__(
            ScaleBytes(),
            nn.Conv2d(channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * height * width, features),
            nn.ReLU(),
        )
        self.features = features


class ScaleBytes(nn.Module):
    """Unsigned bytes to float32 in [0, 1]; float32 passes unchanged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale `(batch, *shape)`."""
        return x.float() / 255.0 if x.dtype == torch.uint8 else x


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


def q_network(obs_shape: tuple[int, ...], actions: int, hidden_sizes: Sequence[int], *, dueling: bool) -> nn.Sequential:
    """Action-value network: Nature CNN for images `(channels, height, width)`, else an MLP over flat observations."""
    if len(obs_shape) == 3:
        trunk: list[nn.Module] = [NatureCNN(obs_shape)]
        width = 512
    else:
        trunk = [nn.Flatten()] if len(obs_shape) != 1 else []
        width = math.prod(obs_shape)
        for size in hidden_sizes[:-1] if dueling else hidden_sizes:
            trunk += [nn.Linear(width, size), nn.ReLU()]
            width = size
    head = DuelingHead(width, actions, hidden_sizes[-1]) if dueling else nn.Linear(width, actions)
    return nn.Sequential(*trunk, head)
