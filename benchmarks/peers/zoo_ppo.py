"""PPO's settings of Stable-Baselines3's RL Zoo (hyperparams/ppo.yml), for Stable-Baselines3 and for composed programs.

Pendulum's state-dependent noise is left out on both sides, because PEARL does not have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ZooTask:
    """An environment, how long and with how many seeds it is trained, and PPO's settings for it.

    `falling`: learning rate and clip range fall to 0 over the run. `normalized`: observations by their mean and
    deviation, rewards by the deviation of their discounted sums.
    """

    environment: str
    steps: int
    envs: int
    horizon: int
    seeds: int = 5
    batch_size: int = 64
    epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    learning_rate: float = 3e-4
    clip_range: float = 0.2
    falling: bool = False
    entropy: float = 0.0
    value: float = 0.5
    max_grad_norm: float = 0.5
    normalized: bool = False
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
    initial_log_std: float = 0.0
    orthogonal: bool = True

    @property
    def schedule(self) -> Literal["linear", "constant"]:
        """Of learning rate and clip range."""
        return "linear" if self.falling else "constant"


# Of MuJoCo: HalfCheetah-v3 and Hopper-v3, which are trained for 1,000,000 steps there.
_MUJOCO: dict[str, Any] = {
    "envs": 1,
    "horizon": 512,
    "steps": 300_000,
    "seeds": 3,
    "normalized": True,
    "hidden": (256, 256),
    "activation": "relu",
    "initial_log_std": -2.0,
    "orthogonal": False,
}
TASKS = (
    ZooTask(
        "CartPole-v1",
        100_000,
        8,
        32,
        batch_size=256,
        epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=1e-3,
        falling=True,
    ),
    ZooTask("Pendulum-v1", 100_000, 4, 1024, gamma=0.9, learning_rate=1e-3),
    ZooTask("Acrobot-v1", 1_000_000, 16, 256, epochs=4, gae_lambda=0.94, normalized=True),
    ZooTask("LunarLander-v3", 1_000_000, 16, 1024, epochs=4, gamma=0.999, gae_lambda=0.98, entropy=0.01),
    ZooTask(
        "HalfCheetah-v5",
        **_MUJOCO,
        epochs=20,
        gamma=0.98,
        gae_lambda=0.92,
        learning_rate=2.0633e-5,
        clip_range=0.1,
        entropy=0.000401762,
        value=0.58096,
        max_grad_norm=0.8,
    ),
    ZooTask(
        "Hopper-v5",
        **_MUJOCO,
        batch_size=32,
        epochs=5,
        gamma=0.999,
        gae_lambda=0.99,
        learning_rate=9.80828e-5,
        entropy=0.00229519,
        value=0.835671,
        max_grad_norm=0.7,
    ),
)
BY_ENVIRONMENT = {task.environment: task for task in TASKS}
