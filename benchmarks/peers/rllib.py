"""RLlib: advantages by a filter of SciPy, one episode after the other."""

from collections.abc import Mapping

import numpy as np
import ray
from ray.rllib.evaluation.postprocessing import Postprocessing, compute_advantages
from ray.rllib.policy.sample_batch import SampleBatch

VERSION = ray.__version__


class _Advantages:
    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        self.shape = rollout["rewards"].shape
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.episodes = []
        for env in range(self.shape[1]):
            ends = rollout["ends"][:, env] != 0
            first = 0
            for last in (*np.flatnonzero(ends), self.shape[0] - 1):
                if first > last:
                    continue
                steps = slice(first, last + 1)
                batch = SampleBatch(
                    {
                        SampleBatch.REWARDS: rollout["rewards"][steps, env],
                        SampleBatch.VF_PREDS: rollout["values"][steps, env],
                    }
                )
                last_value = 0.0 if ends[last] else float(rollout["last_values"][env])
                self.episodes.append((env, steps, batch, last_value))
                first = last + 1

    def __call__(self) -> None:
        for _, _, batch, last_value in self.episodes:
            compute_advantages(batch, last_value, self.gamma, self.gae_lambda)

    def advantages(self) -> np.ndarray:
        found = np.empty(self.shape, np.float32)
        for env, steps, batch, _ in self.episodes:
            found[steps, env] = batch[Postprocessing.ADVANTAGES]
        return found


make_advantages = _Advantages
