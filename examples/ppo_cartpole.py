"""Compose and train PPO on CartPole-v1, from rollouts instead of a replay."""

from __future__ import annotations

import sys
from pathlib import Path

from pearl import Composer
from pearl.algorithms import PPO
from pearl.runtime import run_generated, run_program
from pearl.schedules import Schedule

ENV = "CartPole-v1"
FOLDER = Path("runs") / f"ppo-{ENV}"


class PPOTrainer(PPO):
    """PPO with short rollouts; learning rate and clip range fall to 0 over the run."""

    horizon = 32
    epochs = 20
    batch_size = 256
    gamma = 0.98
    gae_lambda = 0.8
    learning_rate = 1e-3
    learning_rate_schedule: Schedule = "linear"
    clip_range_schedule: Schedule = "linear"


def main() -> int:
    """Compose, show why, write the program, run it."""
    composer = Composer()
    composer.set_actors(1, env=ENV)
    composer.set_train_function(learner=PPOTrainer)
    advantages, learner = composer.run()
    print(composer.matrix, composer.placement, sep="\n\n")
    composer.save(FOLDER)
    program = composer.runtime_gen(advantages, learner, FOLDER / "program.py", timesteps=100_000, run_dir=FOLDER)
    return run_generated(program, sys.argv[1:])


if __name__ == "__main__":
    run_program(main)
