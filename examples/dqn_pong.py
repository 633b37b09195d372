"""Compose and train a double DQN on Atari Pong, from its pixels. Needs `pip install 'pearl-toolkit[atari]'`.

Environments are given by name, here and in the generated program. The wrapped one is registered below under a name of
its own, in the module of the trainer class, which the program and its actors import.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from torch import nn

from pearl import Composer
from pearl.algorithms import DQN
from pearl.algorithms.networks import ScaleBytes
from pearl.exploration import EpsilonGreedy
from pearl.runtime import run_generated, run_program
from pearl.schedules import Schedule

ENV = "PongFrames-v0"
FOLDER = Path("runs") / "dqn-Pong"


def make_pong(**kwargs: Any) -> gym.Env[Any, Any]:
    """Pong as in Mnih et al. 2015: `(4, 84, 84)` uint8, the last four grey frames; each action lasts four frames."""
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **kwargs)
    return FrameStackObservation(AtariPreprocessing(env), 4)


gym.register_envs(ale_py)
gym.register(ENV, make_pong, reward_threshold=18.0)


class DQNTrainer(DQN):
    """Double DQN with five-step returns and a gradient step for two environment steps, sized for two cores."""

    learning_rate = 2.5e-4
    learning_rate_schedule: Schedule = "constant"
    batch_size = 32
    n_step = 5
    replay_ratio = 16.0
    learning_starts = 5_000
    target_update_interval = 500
    exploration = EpsilonGreedy(start=1.0, end=0.02, steps=40_000)

    def build(self) -> None:
        """Adam with a larger epsilon: the first gradients are small and similar, and could kill the first ReLUs."""
        super().build()
        self.optimizer.param_groups[0]["eps"] = 1.5e-4

    def build_q_network(self) -> nn.Module:
        """The network of Mnih et al. 2013: a third of the work of the default, `NatureCNN`."""
        return nn.Sequential(
            ScaleBytes(),
            nn.Conv2d(4, 16, 8, 4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 9 * 9, 256),
            nn.ReLU(),
            nn.Linear(256, int(self.action_space.n)),
        )


def main() -> int:
    """Compose, show why, write the program, run it."""
    composer = Composer()
    composer.set_opt_metric("throughput")
    composer.set_actors(1, env=ENV, envs_per_actor=8)
    composer.set_train_function(learner=DQNTrainer)
    composer.set_replay(100_000, mode="prioritized", fanout=16, share_frames=True)  # 0.7 GB; as stacks, 5.6 GB
    replay, learner = composer.run()
    print(composer.matrix, composer.placement, sep="\n\n")
    composer.save(FOLDER)
    program = composer.runtime_gen(
        replay=replay, learner=learner, path=FOLDER / "program.py", timesteps=600_000, run_dir=FOLDER
    )
    return run_generated(program, sys.argv[1:])


if __name__ == "__main__":
    run_program(main)
