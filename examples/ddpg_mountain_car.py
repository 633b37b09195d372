"""Compose and train DDPG on MountainCarContinuous-v0, the paper's continuous benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

from pearl import Composer
from pearl.algorithms import DDPG
from pearl.exploration import OrnsteinUhlenbeck
from pearl.runtime import run_generated, run_program

ENV = "MountainCarContinuous-v0"
FOLDER = Path("runs") / f"ddpg-{ENV}"


class DDPGTrainer(DDPG):
    """DDPG with the paper's network sizes (Table III); correlated noise and 5-step returns find the distant goal.

    The noise replaces the first random steps: independent actions never reach the goal.
    """

    hidden_sizes = (256, 128)
    actor_learning_rate = 5e-4
    replay_ratio = 16.0
    learning_starts = 8000
    n_step = 5
    scale_observations = True  # the velocity is bounded by 0.07, the position by 1.2
    exploration = OrnsteinUhlenbeck(sigma=0.4, theta=0.1, random_steps=0)


def main() -> int:
    """Compose, show why, write the program, run it."""
    composer = Composer()
    composer.set_opt_metric("throughput")
    composer.set_actors(1, env=ENV)
    composer.set_train_function(learner=DDPGTrainer)
    composer.set_replay(100_000, mode="prioritized", fanout=16)
    replay, learner = composer.run()
    print(composer.matrix, composer.placement, sep="\n\n")
    composer.save(FOLDER)
    program = composer.runtime_gen(
        replay=replay, learner=learner, path=FOLDER / "program.py", timesteps=100_000, run_dir=FOLDER
    )
    return run_generated(program, sys.argv[1:])


if __name__ == "__main__":
    run_program(main)
