"""`train()` of Stable-Baselines3 and sb3-contrib: uniform replay (they have no prioritised one), one thread."""

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
    name, kwargs = f"stable-baselines3 {sb3.__version__}", {"net_arch": list(case.hidden)}
    if case.quantiles:
        import sb3_contrib

        kinds |= {"qrdqn": sb3_contrib.QRDQN, "tqc": sb3_contrib.TQC}
        name = f"sb3-contrib {sb3_contrib.__version__}"
        kwargs |= {"n_quantiles": case.quantiles, **({"n_critics": case.critics} if case.algorithm == "tqc" else {})}
    policy, more = ("MlpPolicy", {"policy_kwargs": kwargs}) if case.hidden else ("CnnPolicy", {})
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
    if case.algorithm in ("dqn", "qrdqn"):
        buffer.actions[:] = rng.integers(0, model.action_space.n, buffer.actions.shape)
    else:
        buffer.actions[:] = rng.uniform(-1, 1, buffer.actions.shape)
    buffer.rewards[:] = rng.standard_normal(buffer.rewards.shape)
    buffer.dones[:] = rng.random(buffer.dones.shape) < 0.01
    buffer.full = True
    return f"{name}, uniform replay", partial(model.train, batch_size=case.batch)


if __name__ == "__main__":
    serve(make)
