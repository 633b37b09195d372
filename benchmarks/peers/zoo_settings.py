"""Hyperparameters of RL Zoo (hyperparams/{dqn,qrdqn,ddpg,sac,tqc,td3,ppo}.yml), by algorithm and environment.

What is not named keeps Stable-Baselines3's default. The Zoo names older versions of some environments (LunarLander-v2,
HalfCheetah-v3 and Hopper-v3).
"""

from __future__ import annotations

from typing import Any

_DQN_CLASSIC: dict[str, Any] = {
    "steps": 100_000,
    "learning_rate": 6.3e-4,
    "batch_size": 128,
    "buffer_size": 50_000,
    "learning_starts": 0,
    "gamma": 0.99,
    "target_update_interval": 250,
    "train_freq": 4,
    "gradient_steps": -1,
    "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
    "policy_kwargs": {"net_arch": [256, 256]},
}
_SAC_MUJOCO: dict[str, Any] = {"steps": 100_000, "learning_starts": 10_000}  # the Zoo trains for 1,000,000 steps

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("dqn", "CartPole-v1"): {
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
    ("qrdqn", "CartPole-v1"): {
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
        "policy_kwargs": {"net_arch": [256, 256], "n_quantiles": 10},
    },
    ("tqc", "Pendulum-v1"): {"steps": 20_000, "learning_rate": 1e-3},
    ("ppo", "CartPole-v1"): {
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
    ("sac", "Pendulum-v1"): {"steps": 20_000, "learning_rate": 1e-3},
    ("td3", "Pendulum-v1"): {
        "steps": 20_000,
        "learning_rate": 1e-3,
        "gamma": 0.98,
        "buffer_size": 200_000,
        "learning_starts": 10_000,
        "train_freq": 1,
        "gradient_steps": 1,
        "policy_kwargs": {"net_arch": [400, 300]},
    },
    ("dqn", "Acrobot-v1"): _DQN_CLASSIC,
    ("dqn", "LunarLander-v3"): _DQN_CLASSIC,
    ("ddpg", "MountainCarContinuous-v0"): {"steps": 300_000},
    ("sac", "MountainCarContinuous-v0"): {
        "steps": 50_000,
        "learning_rate": 3e-4,
        "buffer_size": 50_000,
        "batch_size": 512,
        "ent_coef": 0.1,
        "train_freq": 32,
        "gradient_steps": 32,
        "gamma": 0.9999,
        "tau": 0.01,
        "learning_starts": 0,
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -3.67, "net_arch": [64, 64]},
    },
    ("sac", "BipedalWalker-v3"): {
        "steps": 500_000,
        "learning_rate": 7.3e-4,
        "buffer_size": 300_000,
        "batch_size": 256,
        "ent_coef": "auto",
        "gamma": 0.98,
        "tau": 0.02,
        "train_freq": 64,
        "gradient_steps": 64,
        "learning_starts": 10_000,
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -3, "net_arch": [400, 300]},
    },
    ("dqn", "BenchmarkPong-v0"): {
        "steps": 10_000_000,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "buffer_size": 100_000,
        "learning_starts": 100_000,
        "target_update_interval": 1_000,
        "train_freq": 4,
        "gradient_steps": 1,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.01,
    },
    ("sac", "Hopper-v5"): _SAC_MUJOCO,
    ("sac", "HalfCheetah-v5"): _SAC_MUJOCO,
}
ALGORITHMS = tuple(dict.fromkeys(algorithm for algorithm, _ in SETTINGS))


def settings_of(algorithm: str, environment: str) -> tuple[dict[str, Any], int]:
    """The settings, and for how many environment steps the Zoo trains with them."""
    settings = dict(SETTINGS[algorithm, environment])
    return settings, settings.pop("steps")
