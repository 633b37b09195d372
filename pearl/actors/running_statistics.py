"""Normalises what an actor stores for a replay by the statistics of the run, as Stable-Baselines3's VecNormalize does.

The host merges what all actors have seen (`pearl.runtime.statistics`) and publishes the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pearl.moments import REWARD_CLIP, Moments, normalized
from pearl.spec import OBSERVATION_STATISTICS, RETURN_STATISTICS, TransitionSpec


class ActorStatistics:
    """The statistics by which an actor of `envs` environments normalises, and what it has seen since its last message.

    A message is collected with the same statistics from its first to its last step.
    """

    def __init__(self, transition: TransitionSpec, envs: int, gamma: float) -> None:
        self._names = tuple(f.name for f in transition.statistics)
        self.of_observations, self.of_rewards = (n in self._names for n in (OBSERVATION_STATISTICS, RETURN_STATISTICS))
        self._shape = transition.observation_shape
        self._known = {OBSERVATION_STATISTICS: Moments(self._shape), RETURN_STATISTICS: Moments(())}
        self._seen: list[np.ndarray] = []  # observations since the last message
        self._returns, self._gamma = np.zeros(envs), gamma
        self._seen_returns: list[np.ndarray] = []
        self._use()

    def adopt(self, flat: np.ndarray) -> None:
        """Take the run's statistics, as `pearl.runtime.statistics` publishes them."""
        start = 0
        for name in self._names:
            target = self._known[name].flat
            target[:] = flat[start : start + len(target)]
            start += len(target)
        self._use()

    def _use(self) -> None:
        observations, returns = self._known[OBSERVATION_STATISTICS], self._known[RETURN_STATISTICS]
        self._mean, self._scale = observations.mean.astype(np.float32), observations.scale.astype(np.float32)
        self._reward_scale = float(returns.scale)

    def begin(self, obs: np.ndarray) -> np.ndarray:
        """Normalised first observations `(envs, *obs)` float32; the run's very first ones give the first mean."""
        self._returns[:] = 0.0
        if self.of_observations and not self._known[OBSERVATION_STATISTICS].count:
            first = Moments(self._shape)
            first.add(obs)
            self._mean, self._scale = first.mean.astype(np.float32), first.scale.astype(np.float32)
        return self.observed(obs)

    def observed(self, obs: np.ndarray) -> np.ndarray:
        """Count observations `(envs, *obs)` float32, and return them normalised."""
        if not self.of_observations:
            return obs
        self._seen.append(obs)
        return self.normalized(obs)

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations `(n, *obs)` float32 normalised, which are not counted."""
        return normalized(obs, self._mean, self._scale) if self.of_observations else obs

    def rewarded(self, reward: np.ndarray, done: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Count the discounted returns up to this step, and return its rewards `(envs,)` scaled."""
        if not self.of_rewards:
            return reward
        self._returns = self._returns * self._gamma + np.where(real, reward, 0.0)
        self._seen_returns.append(self._returns[real])
        self._returns = np.where(done | ~real, 0.0, self._returns)
        return np.clip(reward * self._reward_scale, -REWARD_CLIP, REWARD_CLIP)

    def write(self, message: Mapping[str, np.ndarray]) -> None:
        """Put what was seen since the last message into this one, and use it from now on."""
        for name, seen in ((OBSERVATION_STATISTICS, self._seen), (RETURN_STATISTICS, self._seen_returns)):
            if name not in self._names:
                continue
            block = Moments(self._known[name].mean.shape)
            if seen:
                block.add(np.concatenate(seen))
            message[name][:] = block.flat
            self._known[name].merge(block.flat)
            seen.clear()
        self._use()
