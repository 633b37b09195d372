"""The rule of `benchmarks.solve_time` for a solved environment, for peers that have no such rule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

EPISODES = 20
INTERVAL = 1_000  # environment steps between evaluations
SOLVED = "Stopping: solved"  # start of the line that a composed program prints
FIRST_STEP = "First training step"  # start of the line that a peer prints after it
COMPILED = "Compiled in"  # start of the line of a peer that has compiled a program; seconds follow

Act = Callable[[np.ndarray], np.ndarray]  # greedy actions (envs, *action) for observations (envs, *obs)


@dataclass
class Examiner:
    """Plays `EPISODES` greedy episodes at once, every `interval` environment steps.

    Solved means that the mean return reaches `goal` twice. The second mean is over other episodes, as in a composed
    program.
    """

    environment: str
    goal: float
    seed: int
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        self.envs = gym.make_vec(self.environment, num_envs=EPISODES, vectorization_mode="sync")

    def passes(self, act: Act) -> bool:
        """Whether the policy has solved the environment; prints a line if it has."""
        mean = 0.0
        for first_seed in (10_000, 20_000):
            mean = self.mean_return(act, first_seed + self.seed)
            if mean < self.goal:
                return False
        print(f"{SOLVED} (mean greedy return {mean:.1f} over {EPISODES} episodes).", flush=True)
        return True

    def mean_return(self, act: Act, seed: int) -> float:
        """Mean undiscounted return of one episode of each environment."""
        obs, _ = self.envs.reset(seed=seed)
        returns, playing = np.zeros(EPISODES), np.ones(EPISODES, bool)
        while playing.any():
            obs, rewards, terminated, truncated, _ = self.envs.step(act(obs))
            returns[playing] += rewards[playing]
            playing &= ~(terminated | truncated)
        return float(returns.mean())


def parse(description: str | None, **choices: Any) -> argparse.Namespace:
    """Options of a peer's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--goal", type=float, default=475.0, help="mean return that solves it")
    parser.add_argument("--interval", type=int, default=INTERVAL, help="environment steps between evaluations")
    for name, options in choices.items():
        parser.add_argument(f"--{name}", choices=options, default=options[0])
    return parser.parse_args()
