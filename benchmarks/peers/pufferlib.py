"""PufferLib: advantages in C++, one environment after the other, with V-trace's weights (here all 1)."""

from collections.abc import Mapping
from importlib.metadata import version

import numpy as np
import torch
from pufferlib import _C  # noqa: F401  registers the operator

VERSION = version("pufferlib")


class _Advantages:
    """Rows of `(envs, horizon + 1)`: a reward and an end stand with the observation that follows the step."""

    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        first = np.zeros((1, rollout["rewards"].shape[1]), np.float32)
        values, rewards, ends = (
            torch.from_numpy(np.ascontiguousarray(np.concatenate(rows).T.astype(np.float32)))
            for rows in (
                (rollout["values"], rollout["last_values"][None]),
                (first, rollout["rewards"]),
                (first, rollout["ends"] != 0),
            )
        )
        self.found = torch.zeros_like(values)
        self.arguments = values, rewards, ends, torch.ones_like(values), self.found, gamma, gae_lambda, 1.0, 1.0

    def __call__(self) -> None:
        torch.ops.pufferlib.compute_puff_advantage(*self.arguments)

    def advantages(self) -> np.ndarray:
        return self.found[:, :-1].numpy().T


make_advantages = _Advantages
