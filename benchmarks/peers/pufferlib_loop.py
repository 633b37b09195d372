"""The estimate of advantages of PufferLib's C++, rewritten for numba: for machines where PufferLib cannot be installed.

Its weights of V-trace, which are all 1 on policy, are left out.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from numba import njit

VERSION = "(compiled by numba)"


@njit
def _estimate(
    values: np.ndarray, rewards: np.ndarray, ends: np.ndarray, found: np.ndarray, gamma: float, gae_lambda: float
) -> None:
    for env in range(values.shape[0]):
        advantage = np.float32(0)
        for t in range(values.shape[1] - 2, -1, -1):
            goes_on = np.float32(1) - ends[env, t + 1]
            delta = rewards[env, t + 1] + gamma * values[env, t + 1] * goes_on - values[env, t]
            advantage = delta + gamma * gae_lambda * advantage * goes_on
            found[env, t] = advantage


class _Advantages:
    """Rows of `(envs, horizon + 1)`: a reward and an end stand with the observation that follows the step."""

    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        first = np.zeros((1, rollout["rewards"].shape[1]), np.float32)
        values, rewards, ends = (
            np.ascontiguousarray(np.concatenate(rows).T.astype(np.float32))
            for rows in (
                (rollout["values"], rollout["last_values"][None]),
                (first, rollout["rewards"]),
                (first, rollout["ends"] != 0),
            )
        )
        self.found = np.zeros_like(values)
        self.compute = partial(_estimate, values, rewards, ends, self.found, np.float32(gamma), np.float32(gae_lambda))

    def __call__(self) -> None:
        self.compute()

    def advantages(self) -> np.ndarray:
        return self.found[:, :-1].T


make_advantages = _Advantages
