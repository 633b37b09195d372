"""Stable-Baselines3: uniform replay in NumPy, one row of environments per insertion; advantages in a loop of NumPy."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

VERSION = version("stable-baselines3")
LACKS = dict.fromkeys(("tree", "replay"), "has no prioritised replay")


class _Uniform:
    def __init__(self, columns: Mapping[str, np.ndarray], batch: int) -> None:
        rows = len(columns["reward"])
        observations = spaces.Box(-np.inf, np.inf, columns["obs"].shape[1:])
        self.buffer = ReplayBuffer(
            rows, observations, spaces.Discrete(2), device="cpu", n_envs=batch, handle_timeout_termination=False
        )
        steps = rows // batch

        def shaped(name: str) -> np.ndarray:
            return columns[name][: steps * batch].reshape(steps, batch, -1)

        self.buffer.observations[:] = shaped("obs")
        self.buffer.next_observations[:] = shaped("next_obs")
        self.buffer.actions[:] = shaped("action")
        self.buffer.rewards[:] = shaped("reward")[..., 0]
        self.buffer.dones[:] = shaped("discount")[..., 0] == 0
        self.buffer.full = True
        self.infos: list[dict[str, Any]] = [{} for _ in range(batch)]

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def insert(self, rows: Mapping[str, np.ndarray]) -> None:
        self.buffer.add(rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["discount"], self.infos)

    def unpack(self, sample: Any) -> tuple[np.ndarray, None, None]:
        return sample.observations.numpy(), None, None


make_uniform = _Uniform


class _Advantages:
    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        horizon, envs = rollout["rewards"].shape
        self.buffer = RolloutBuffer(
            horizon,
            spaces.Box(-1.0, 1.0, (1,)),
            spaces.Discrete(2),
            device="cpu",
            gae_lambda=gae_lambda,
            gamma=gamma,
            n_envs=envs,
        )
        self.buffer.rewards[:] = rollout["rewards"]
        self.buffer.values[:] = rollout["values"]
        self.buffer.episode_starts[1:] = rollout["ends"][:-1]
        self.last_values = torch.from_numpy(rollout["last_values"])
        self.dones = rollout["ends"][-1]

    def __call__(self) -> None:
        self.buffer.compute_returns_and_advantage(self.last_values, self.dones)

    def advantages(self) -> np.ndarray:
        return self.buffer.advantages


make_advantages = _Advantages
