"""The networks of on-policy algorithms in torch, and the statistics that normalise their observations."""

from __future__ import annotations

import torch
from torch import nn

from pearl.moments import ADDED_VARIANCE, OBSERVATION_CLIP, ROUNDING_VARIANCE


class PolicyAndValue(nn.Module):
    """Everything an actor needs: `policy` and `value` networks, log deviations, and the observations' normalisation.

    Networks take observations `(batch, *obs)`; `policy` gives the distribution's outputs, `value` `(batch, 1)`. They
    may share modules. With `normalized`, observations are shifted and scaled by buffers first, and clipped to 10
    deviations.
    """

    observation_mean: torch.Tensor
    observation_scale: torch.Tensor

    def __init__(
        self, policy: nn.Module, value: nn.Module, log_std: torch.Tensor | None, normalized: tuple[int, ...] | None
    ) -> None:
        super().__init__()
        self.policy, self.value = policy, value
        self.log_std = None if log_std is None else nn.Parameter(log_std)
        if normalized is not None:
            self.register_buffer("observation_mean", torch.zeros(normalized))
            self.register_buffer("observation_scale", torch.ones(normalized))
        self.is_normalized = normalized is not None

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations as the networks take them."""
        if not self.is_normalized:
            return obs
        return ((obs - self.observation_mean) * self.observation_scale).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distribution's outputs `(batch, outputs)` and values `(batch,)` of raw observations."""
        inputs = self.normalize(obs)
        return self.policy(inputs), self.value(inputs).squeeze(1)


class ObservationStatistics(nn.Module):
    """Count, mean and sum of squared distances of all observations so far, float64; checkpoints keep them."""

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64))

    def add(self, obs: torch.Tensor) -> None:
        """Take `(rows, *obs)` in."""
        block = obs.double()
        rows, mean = len(block), block.mean(dim=0)
        total, distance = float(self.count) + rows, mean - self.mean
        self.squares += (block - mean).square().sum(dim=0) + distance.square() * (float(self.count) * rows / total)
        self.mean += distance * (rows / total)
        self.count.fill_(total)

    @property
    def scale(self) -> torch.Tensor:
        """One over the deviation; of elements that never changed, 1."""
        variance = self.squares / self.count.clamp(min=1.0)
        changed = variance > ROUNDING_VARIANCE
        return torch.where(changed, (variance + ADDED_VARIANCE).rsqrt(), torch.ones_like(variance))
