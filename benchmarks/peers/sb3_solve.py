"""Stable-Baselines3 or sb3-contrib with the settings that RL Zoo has tuned, until the environment is solved."""

from __future__ import annotations

from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise

from benchmarks.peers.solving import Examiner, parse
from benchmarks.peers.zoo_settings import ALGORITHMS, settings_of

NOISE = {"td3": 0.1}  # standard deviation of the action noise


class Examination(BaseCallback):
    """Stops training when the policy passes."""

    def __init__(self, examiner: Examiner) -> None:
        super().__init__()
        self.examiner = examiner

    def _on_step(self) -> bool:
        if self.num_timesteps % self.examiner.interval:
            return True
        return not self.examiner.passes(lambda obs: self.model.predict(obs, deterministic=True)[0])


def main() -> None:
    options = parse(__doc__, algorithm=ALGORITHMS)
    torch.set_num_threads(1)
    settings, steps = settings_of(options.algorithm, options.environment)
    examiner = Examiner(options.environment, options.goal, options.seed, options.interval)
    if scale := NOISE.get(options.algorithm):
        size = examiner.envs.single_action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, scale))
    model = model_of(options.algorithm, options.environment, options.seed, settings)
    model.learn(steps, callback=Examination(examiner))
    print(f"Steps: {model.num_timesteps}")


def model_of(algorithm: str, environment: str, seed: int, settings: dict[str, Any]) -> Any:
    """A model with `settings`, in as many environments as `n_envs` says there."""
    settings = dict(settings)
    kinds: dict[str, Any] = {"dqn": sb3.DQN, "ppo": sb3.PPO, "sac": sb3.SAC, "td3": sb3.TD3}
    if algorithm in ("qrdqn", "tqc"):
        import sb3_contrib

        kinds |= {"qrdqn": sb3_contrib.QRDQN, "tqc": sb3_contrib.TQC}
    envs: Any = environment
    if "n_envs" in settings:
        envs = make_vec_env(environment, n_envs=settings.pop("n_envs"), seed=seed)
    return kinds[algorithm]("MlpPolicy", envs, seed=seed, device="cpu", **settings)


if __name__ == "__main__":
    main()
