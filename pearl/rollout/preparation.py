"""Prepares a rollout's rewards and values for the estimate of advantages (HEPPO-GAE, Sec. II)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pearl.moments import REWARD_CLIP
from pearl.rollout.columns import GOES_ON, NO_STEP
from pearl.rollout.gae import AdvantageEstimator
from pearl.rollout.quantization import RANGE, Codes, RunningStatistics, quantized
from pearl.rollout.vtrace import vtrace
from pearl.spec import RolloutSpec

_STATISTICS = ("count", "mean", "squares")


class RolloutPreparation:
    """Standardises and quantises as `spec` says, and keeps the statistics that outlive a rollout.

    `envs` environments collect; `gamma` is the discount of the "returns" standardisation.
    """

    def __init__(self, spec: RolloutSpec, envs: int, gamma: float) -> None:
        self.spec, self._envs, self._gamma = spec, envs, gamma
        self._rewards = RunningStatistics()  # of rewards, or of discounted returns
        self._returns = np.zeros(envs)  # discounted, of the unfinished episodes
        self._saturated = {"rewards": 0, "values": 0}
        self._bytes = {"rewards": 0, "values": 0}

    def estimate(
        self,
        estimator: AdvantageEstimator,
        rewards: np.ndarray,
        values: np.ndarray,
        bonus: np.ndarray,
        last_values: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        """Overwrite `rewards` by advantages and `values` by returns, `(horizon, envs)` float32 each.

        `bonus` is gamma times the value of the last observation where a time limit ended an episode; `ends` is that
        of `pearl.rollout.columns`.
        """
        real = ends != NO_STEP
        mean, deviation = self._scale(rewards, ends, real)
        spec, extra = self.spec, bonus if np.count_nonzero(bonus) else None
        if spec.quantization_bits:
            bits = spec.quantization_bits
            restored = spec.reward_standardization == "block_restored"
            reward_codes = quantized(rewards, bits, mean, deviation, restored=restored)
            value_codes = quantized(values, bits, *_statistics_of(values[real]), restored=True)
            self._note(reward_codes, value_codes)
            estimator.estimate_codes(reward_codes, value_codes, extra, last_values, ends, rewards, values)
            return
        self._apply(rewards, values, extra, mean, deviation)
        estimator.estimate(rewards, values, last_values, ends)

    def correct(
        self,
        rewards: np.ndarray,
        values: np.ndarray,
        bonus: np.ndarray,
        last_values: np.ndarray,
        ends: np.ndarray,
        log_ratios: np.ndarray,
    ) -> None:
        """The same by V-trace, for the present policy: `values` are its own, `log_ratios` those of `vtrace`.

        `bonus` and `last_values` are those of the policy that acted: a rollout does not hold their observations.
        """
        mean, deviation = self._scale(rewards, ends, ends != NO_STEP)
        self._apply(rewards, values, bonus, mean, deviation)
        vtrace(rewards, values, last_values, ends, log_ratios, self._gamma, self.spec.gae_lambda)

    def _apply(
        self, rewards: np.ndarray, values: np.ndarray, bonus: np.ndarray | None, mean: float, deviation: float
    ) -> None:
        """Standardise in place, in float32."""
        self._bytes = {"rewards": rewards.nbytes, "values": values.nbytes}
        if self.spec.reward_standardization not in ("none", "block_restored"):
            rewards -= np.float32(mean)
            rewards /= np.float32(deviation)
        if self.spec.reward_standardization == "returns":
            np.clip(rewards, -REWARD_CLIP, REWARD_CLIP, out=rewards)
        if bonus is not None:
            rewards += bonus

    def _scale(self, rewards: np.ndarray, ends: np.ndarray, real: np.ndarray) -> tuple[float, float]:
        """Mean and deviation by which the rewards are standardised."""
        kind = self.spec.reward_standardization
        if kind == "none":
            return 0.0, 1.0
        if kind == "returns":
            self._rewards.add(self._discounted(rewards, ends)[real])
            return 0.0, self._rewards.deviation
        block = rewards[real]
        if kind == "dynamic":
            self._rewards.add(block)
            return self._rewards.mean, self._rewards.deviation
        return _statistics_of(block)

    def _discounted(self, rewards: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The discounted sum of the rewards of each episode up to each step, float64."""
        found = np.empty(rewards.shape)
        running = self._returns
        for t, reward in enumerate(rewards):
            running = running * self._gamma + reward
            found[t] = running
            running = np.where(ends[t] == GOES_ON, running, 0.0)
        self._returns = running
        return found

    def _note(self, rewards: Codes, values: Codes) -> None:
        for name, codes in (("rewards", rewards), ("values", values)):
            self._saturated[name] += codes.saturated
            self._bytes[name] = codes.nbytes

    def begin_episodes(self) -> None:
        """Start new episodes in all environments: later rewards do not belong to earlier episodes."""
        self._returns = np.zeros(self._envs)

    # --- reports and state ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        """Statistics of the rewards so far, and how many numbers lay outside the quantiser's range."""
        found: dict[str, float] = {}
        if self._rewards.count:
            what = "discounted_return" if self.spec.reward_standardization == "returns" else "reward"
            found = {f"{what}_mean": self._rewards.mean, f"{what}_deviation": self._rewards.deviation}
        if self.spec.quantization_bits:
            found |= {f"saturated_{name}": float(count) for name, count in self._saturated.items()}
        return found

    def memory(self) -> dict[str, object]:
        """Bytes of the last rollout's rewards and values while they waited for GAE, and what float32 would take."""
        size = {"horizon": self.spec.horizon, "envs": self._envs, "float32_bytes": 8 * self.spec.horizon * self._envs}
        bits = self.spec.quantization_bits
        return {**size, "bytes": sum(self._bytes.values()), "bits": bits or 32, "range_in_deviations": RANGE}

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        found: dict[str, Any] = {f"reward_{name}": getattr(self._rewards, name) for name in _STATISTICS}
        found |= {f"saturated_{name}": count for name, count in self._saturated.items()}
        return {**found, "returns": self._returns.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. Episodes do not outlive a run: their discounted returns restart at 0."""
        count, mean, squares = (state[f"reward_{name}"] for name in _STATISTICS)
        self._rewards = RunningStatistics(int(count), float(mean), float(squares))
        self._saturated = {name: int(state[f"saturated_{name}"]) for name in self._saturated}
        self.begin_episodes()


def _statistics_of(block: np.ndarray) -> tuple[float, float]:
    """Mean and deviation of the numbers; the deviation is 1 where all are equal, and of no numbers they are 0 and 1."""
    if not block.size:
        return 0.0, 1.0
    deviation = float(block.std(dtype=np.float64))
    return float(block.mean(dtype=np.float64)), deviation if deviation > 0 else 1.0
