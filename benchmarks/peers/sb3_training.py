"""Stable-Baselines3's `train()`: uniform replay (it has no prioritised one), one thread."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """A model whose replay buffer is full of random transitions, and its training steps."""
    import gymnasium as gym
    import numpy as np
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.logger import configure

    import benchmarks.pong  # noqa: F401 (registers its environment)

    torch.set_num_threads(1)
    kinds: dict[str, Any] = {"dqn": sb3.DQN, "ddpg": sb3.DDPG, "sac": sb3.SAC}
    policy, more = (
        ("MlpPolicy", {"policy_kwargs": {"net_arch": list(case.hidden)}}) if case.hidden else ("CnnPolicy", {})
    )
    model = kinds[case.algorithm](
        policy, gym.make(case.environment), buffer_size=case.slots, batch_size=case.batch, seed=1, device="cpu", **more
    )
    model.set_logger(configure(None, []))
    buffer, rng = model.replay_buffer, np.random.default_rng(1)
    for column in (buffer.observations, buffer.next_observations):
        if column.dtype == np.uint8:
            column[:] = rng.integers(0, 256, column.shape, np.uint8)
        else:
            column[:] = rng.standard_normal(column.shape, np.float32)
    if case.algorithm == "dqn":
        buffer.actions[:] = rng.integers(0, model.action_space.n, buffer.actions.shape)
    else:
        buffer.actions[:] = rng.uniform(-1, 1, buffer.actions.shape)
    buffer.rewards[:] = rng.standard_normal(buffer.rewards.shape)
    buffer.dones[:] = rng.random(buffer.dones.shape) < 0.01
    buffer.full = True
    return f"stable-baselines3 {sb3.__version__}, uniform replay", partial(model.train, batch_size=case.batch)


if __name__ == "__main__":
    serve(make)
