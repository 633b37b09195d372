"""The estimate of advantages of CleanRL's `ppo.py`, rewritten: a loop over steps in torch.

CleanRL is a collection of scripts: this part of one cannot be imported.
"""

from collections.abc import Mapping

import numpy as np
import torch

VERSION = "(as ppo.py does it)"


class _Advantages:
    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.rewards, self.values, self.last_values = (
            torch.from_numpy(rollout[name]) for name in ("rewards", "values", "last_values")
        )
        self.ends = torch.from_numpy(rollout["ends"] != 0).float()
        self()

    @torch.no_grad()
    def __call__(self) -> None:
        found = torch.zeros_like(self.rewards)
        following, advantage = self.last_values, torch.zeros_like(self.last_values)
        for t in range(len(found) - 1, -1, -1):
            goes_on = 1.0 - self.ends[t]
            delta = self.rewards[t] + self.gamma * following * goes_on - self.values[t]
            advantage = delta + self.gamma * self.gae_lambda * goes_on * advantage
            found[t] = advantage
            following = self.values[t]
        self.found, self.returns = found, found + self.values

    def advantages(self) -> np.ndarray:
        return self.found.numpy()


make_advantages = _Advantages
