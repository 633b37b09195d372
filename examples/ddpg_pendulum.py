"""Compose and train DDPG on Pendulum-v1."""

from __future__ import annotations

import sys
from pathlib import Path

from pearl import Composer
from pearl.algorithms import DDPG
from pearl.exploration import GaussianNoise
from pearl.runtime import run_generated, run_program

ENV = "Pendulum-v1"
FOLDER = Path("runs") / f"ddpg-{ENV}"


class DDPGTrainer(DDPG):
    """DDPG with the paper's network sizes (Table III)."""

    hidden_sizes = (256, 128)
    actor_learning_rate = 1e-3
    replay_ratio = 64.0
    gamma = 0.98
    exploration = GaussianNoise(sigma=0.1)


def main() -> int:
    """Compose, show why, write the program, run it."""
    composer = Composer()
    composer.set_opt_metric("throughput")
    composer.set_actors(1, env=ENV, envs_per_actor=4)
    composer.set_train_function(learner=DDPGTrainer)
    composer.set_replay(100_000, mode="prioritized", fanout=16)
    replay, learner = composer.run()
    print(composer.matrix, composer.placement, sep="\n\n")
    composer.save(FOLDER)
    program = composer.runtime_gen(
        replay=replay, learner=learner, path=FOLDER / "program.py", timesteps=25_000, run_dir=FOLDER
    )
    return run_generated(program, sys.argv[1:])


if __name__ == "__main__":
    run_program(main)
