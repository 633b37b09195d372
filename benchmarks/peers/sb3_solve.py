"""Stable-Baselines3 with the settings that its RL Zoo has tuned, until the environment is solved."""

from __future__ import annotations

from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise

from benchmarks.peers.solving import INTERVAL, Examiner, parse

# RL Zoo's hyperparameters of dqn and ppo CartPole-v1, sac and td3 Pendulum-v1; the rest is Stable-Baselines3's own.
SETTINGS: dict[str, dict[str, Any]] = {
    "dqn": {
        "steps": 50_000,
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 100_000,
        "learning_starts": 1_000,
        "gamma": 0.99,
        "target_update_interval": 10,
        "train_freq": 256,
        "gradient_steps": 128,
        "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [256, 256]},
    },
    "ppo": {
        "steps": 100_000,
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": lambda left: left * 1e-3,
        "clip_range": lambda left: left * 0.2,
    },
    "sac": {"steps": 20_000, "learning_rate": 1e-3},
    "td3": {
        "steps": 20_000,
        "learning_rate": 1e-3,
        "gamma": 0.98,
        "buffer_size": 200_000,
        "learning_starts": 10_000,
        "train_freq": 1,
        "gradient_steps": 1,
        "policy_kwargs": {"net_arch": [400, 300]},
    },
}
NOISE = {"td3": 0.1}  # standard deviation of the action noise


class _Examination(BaseCallback):
    """Stops training when the policy passes."""

    def __init__(self, examiner: Examiner) -> None:
        super().__init__()
        self.examiner = examiner

    def _on_step(self) -> bool:
        if self.num_timesteps % INTERVAL:
            return True
        return not self.examiner.passes(lambda obs: self.model.predict(obs, deterministic=True)[0])


def main() -> None:
    options = parse(__doc__, algorithm=tuple(SETTINGS))
    torch.set_num_threads(1)
    settings = dict(SETTINGS[options.algorithm])
    steps = settings.pop("steps")
    examiner = Examiner(options.environment, options.goal, options.seed)
    if scale := NOISE.get(options.algorithm):
        size = examiner.envs.single_action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, scale))
    model = model_of(options.algorithm, options.environment, options.seed, settings)
    model.learn(steps, callback=_Examination(examiner))


def model_of(algorithm: str, environment: str, seed: int, settings: dict[str, Any]) -> Any:
    """A model with `settings`, in as many environments as `n_envs` says there."""
    settings = dict(settings)
    kinds: dict[str, Any] = {"dqn": sb3.DQN, "ppo": sb3.PPO, "sac": sb3.SAC, "td3": sb3.TD3}
    envs: Any = environment
    if "n_envs" in settings:
        envs = make_vec_env(environment, n_envs=settings.pop("n_envs"), seed=seed)
    return kinds[algorithm]("MlpPolicy", envs, seed=seed, device="cpu", **settings)


if __name__ == "__main__":
    main()
