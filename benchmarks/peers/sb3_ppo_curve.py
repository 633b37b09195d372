"""A learning curve of Stable-Baselines3's PPO with RL Zoo's settings: one line of JSON per evaluation.

A line has the environment steps and the mean return of greedy episodes. Evaluations come after the training on the
rollout in which they fall due, as in composed programs.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import stable_baselines3 as sb3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from benchmarks.peers.zoo_ppo import BY_ENVIRONMENT, ZooTask

_ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}


def vector(task: ZooTask, envs: int, seed: int) -> VecEnv:
    """Environments one after the other, normalised if the task says so."""
    made = make_vec_env(task.environment, n_envs=envs, seed=seed)
    return VecNormalize(made, gamma=task.gamma) if task.normalized else made


def make(task: ZooTask, seed: int) -> sb3.PPO:
    """PPO with the task's settings."""

    def scheduled(value: float) -> Any:
        return (lambda left: left * value) if task.falling else value

    return sb3.PPO(
        "MlpPolicy",
        vector(task, task.envs, seed),
        n_steps=task.horizon,
        batch_size=task.batch_size,
        n_epochs=task.epochs,
        gamma=task.gamma,
        gae_lambda=task.gae_lambda,
        learning_rate=scheduled(task.learning_rate),
        clip_range=scheduled(task.clip_range),
        ent_coef=task.entropy,
        vf_coef=task.value,
        max_grad_norm=task.max_grad_norm,
        policy_kwargs={
            "net_arch": {"pi": list(task.hidden), "vf": list(task.hidden)},
            "activation_fn": _ACTIVATIONS[task.activation],
            "log_std_init": task.initial_log_std,
            "ortho_init": task.orthogonal,
        },
        seed=seed,
        device="cpu",
    )


class _Evaluations(BaseCallback):
    """Plays greedy episodes after the training that follows every `interval` environment steps."""

    def __init__(self, envs: VecEnv, interval: int, episodes: int) -> None:
        super().__init__()
        self.envs, self.interval, self.episodes = envs, interval, episodes
        self.due = interval
        if isinstance(envs, VecNormalize):
            envs.training = envs.norm_reward = False

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.evaluate()

    def _on_training_end(self) -> None:
        self.evaluate()

    def evaluate(self) -> None:
        """Evaluate if it is due."""
        if self.num_timesteps < self.due:
            return
        self.due = (self.num_timesteps // self.interval + 1) * self.interval
        if isinstance(self.envs, VecNormalize):
            sync_envs_normalization(self.training_env, self.envs)
        mean, _ = evaluate_policy(self.model, self.envs, self.episodes, warn=False)
        print(json.dumps({"steps": self.num_timesteps, "return": float(mean)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=BY_ENVIRONMENT)
    parser.add_argument("--steps", type=int, help="other than the task's")
    parser.add_argument("--interval", type=int, required=True, help="environment steps between evaluations")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = BY_ENVIRONMENT[options.environment]
    evaluations = _Evaluations(vector(task, 1, 10_000 + options.seed), options.interval, options.episodes)
    make(task, options.seed).learn(options.steps or task.steps, callback=evaluations)


if __name__ == "__main__":
    main()
