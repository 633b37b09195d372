"""Generalized advantage estimation (GAE, Schulman et al. 2016): its contract, and the reference in NumPy.

    delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lambda * A_{t+1}        (HEPPO-GAE, Eq. 2, 4)
    return_t = V_t + A_t                                                                                    (Eq. 5)

Arrays are `(horizon, envs)`, one row for each step. As in HEPPO's memory (Sec. IV), advantages overwrite the rewards,
and returns overwrite the values. An episode that ends after step t has no V_{t+1} and no A_{t+1}; if its time limit
ended it, its caller adds gamma times the value of its last observation to the reward first.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pearl.rollout.quantization import Codes


class AdvantageEstimator(Protocol):
    """GAE on some device. One thread calls it, once for each rollout."""

    backend: str

    def estimate(self, rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None:
        """Overwrite `rewards` by advantages and `values` by returns, `(horizon, envs)` float32 each.

        `last_values` `(envs,)` float32 are those of the observations after the last step; `ends` `(horizon, envs)`
        uint8 is not 0 where an episode ended after the step.
        """

    def estimate_codes(
        self,
        rewards: Codes,
        values: Codes,
        bonus: np.ndarray | None,
        last_values: np.ndarray,
        ends: np.ndarray,
        advantages: np.ndarray,
        returns: np.ndarray,
    ) -> None:
        """The same of quantised rewards and values, whose codes stay as they are, into `advantages` and `returns`.

        `bonus` `(horizon, envs)` float32 is added to the rewards; None: nothing is.
        """


class NumpyGae:
    """The reference, in float32 with the operations of the kernels: results are equal but for fused roundings."""

    backend = "numpy"

    def __init__(self, gamma: float, gae_lambda: float) -> None:
        self._gamma, self._decay = np.float32(gamma), np.float32(gamma * gae_lambda)

    def estimate(self, rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None:
        """Scan backwards in time, all environments at once."""
        next_value, advantage = last_values.astype(np.float32), np.zeros_like(last_values, np.float32)
        for t in range(len(rewards) - 1, -1, -1):
            goes_on = ends[t] == 0
            value = values[t].copy()
            delta = rewards[t] + self._gamma * np.where(goes_on, next_value, np.float32(0)) - value
            advantage = delta + self._decay * np.where(goes_on, advantage, np.float32(0))
            rewards[t], values[t] = advantage, value + advantage
            next_value = value

    def estimate_codes(
        self,
        rewards: Codes,
        values: Codes,
        bonus: np.ndarray | None,
        last_values: np.ndarray,
        ends: np.ndarray,
        advantages: np.ndarray,
        returns: np.ndarray,
    ) -> None:
        """Decode, then `estimate`."""
        advantages[:], returns[:] = rewards.decoded(), values.decoded()
        if bonus is not None:
            advantages += bonus
        self.estimate(advantages, returns, last_values, ends)
