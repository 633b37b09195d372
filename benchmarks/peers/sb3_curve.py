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

from benchmarks.peers.zoo_settings import settings_of
from benchmarks.pong import ENV as PONG

ALGORITHM_OF = {
    "CartPole-v1": "dqn",
    "MountainCarContinuous-v0": "ddpg",
    "LunarLander-v3": "dqn",
    "Hopper-v5": "sac",
    "HalfCheetah-v5": "sac",
    "BipedalWalker-v3": "sac",
    PONG: "dqn",
}
NOISE = 0.5  # standard deviation of DDPG's action noise


class _Evaluations(BaseCallback):
    """Plays greedy episodes every so many environment steps and prints their mean; ends after `steps` or `seconds`."""

    def __init__(self, environment: str, interval: int, episodes: int, steps: int, seconds: float) -> None:
        super().__init__()
        self.environment, self.interval, self.episodes = gym.make(environment), interval, episodes
        self.steps, self.seconds = steps, seconds
        self.start = time.perf_counter()  # later by the time of the evaluations

    def _on_step(self) -> bool:
        if self.num_timesteps % self.interval == 0:
            paused = time.perf_counter()
            mean, _ = evaluate_policy(self.model, self.environment, self.episodes, warn=False)
            seconds = paused - self.start
            print(json.dumps({"steps": self.num_timesteps, "seconds": seconds, "return": mean}), flush=True)
            self.start += time.perf_counter() - paused
        return self.num_timesteps < self.steps and time.perf_counter() - self.start < self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=ALGORITHM_OF)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True, help="environment steps between evaluations")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which training stops")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--of-zoo", action="store_true", help="schedules are over as many steps as the Zoo trains for, not over --steps"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    algorithm = ALGORITHM_OF[options.environment]
    settings, zoo_steps = settings_of(algorithm, options.environment)
    if algorithm == "ddpg":
        size = gym.make(options.environment).action_space.shape
        settings["action_noise"] = OrnsteinUhlenbeckActionNoise(np.zeros(size), np.full(size, NOISE))
    kind: Any = {"dqn": sb3.DQN, "ddpg": sb3.DDPG, "sac": sb3.SAC}[algorithm]
    policy = "CnnPolicy" if options.environment == PONG else "MlpPolicy"
    model = kind(policy, options.environment, seed=options.seed, device="cpu", **settings)
    evaluations = _Evaluations(options.environment, options.interval, options.episodes, options.steps, options.seconds)
    model.learn(zoo_steps if options.of_zoo else options.steps, callback=evaluations)


if __name__ == "__main__":
    main()
