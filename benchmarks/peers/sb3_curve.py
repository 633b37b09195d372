"""A learning curve of Stable-Baselines3 with the settings that its RL Zoo has tuned: one line of JSON per evaluation.

A line has the environment steps, the seconds of training without evaluations, and the mean return of greedy episodes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

from benchmarks.peers.sb3_solve import SETTINGS

# RL Zoo's hyperparameters of dqn LunarLander-v2 and ddpg MountainCarContinuous-v0; CartPole-v1 is in sb3_solve.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole-v1": ("dqn", {name: value for name, value in SETTINGS["dqn"].items() if name != "steps"}),
    "MountainCarContinuous-v0": ("ddpg", {}),
    "LunarLander-v3": (
        "dqn",
        {
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
        },
    ),
}
NOISE = 0.5  # standard deviation of DDPG's action noise


class _Evaluations(BaseCallback):
    """Plays greedy episodes every so many environment steps, prints their mean return, and ends after `seconds`."""

    def __init__(self, environment: str, interval: int, episodes: int, seconds: float) -> None:
        super().__init__()
        self.environment, self.interval, self.episodes = gym.make(environment), interval, episodes
        self.seconds = seconds
        self.start = time.perf_counter()  # later by the time of the evaluations

    def _on_step(self) -> bool:
        if self.num_timesteps % self.interval == 0:
            paused = time.perf_counter()
            mean, _ = evaluate_policy(self.model, self.environment, self.episodes, warn=False)
            seconds = paused - self.start
            print(json.dumps({"steps": self.num_timesteps, "seconds": seconds, "return": mean}), flush=True)
            self.start += time.perf_counter() - paused
        return time.perf_counter() - self.start < self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=TASKS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True, help="environment steps between evaluations")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which training stops")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    algorithm, settings = TASKS[options.environment]
    if algorithm == "ddpg":
        size = gym.make(options.environment).action_space.shape
        settings["action_noise"] = OrnsteinUhlenbeckActionNoise(np.zeros(size), np.full(size, NOISE))
    kind: Any = {"dqn": sb3.DQN, "ddpg": sb3.DDPG}[algorithm]
    model = kind("MlpPolicy", options.environment, seed=options.seed, device="cpu", **settings)
    evaluations = _Evaluations(options.environment, options.interval, options.episodes, options.seconds)
    model.learn(options.steps, callback=evaluations)


if __name__ == "__main__":
    main()
