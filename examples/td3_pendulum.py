"""Compose and train TD3 on Pendulum-v1."""

from __future__ import annotations

import sys
from pathlib import Path

from pearl import Composer
from pearl.algorithms import TD3
from pearl.runtime import run_generated, run_program

ENV = "Pendulum-v1"
FOLDER = Path("runs") / f"td3-{ENV}"


class TD3Trainer(TD3):
    """TD3 with networks of 2 x 64, wide enough for three observations, and three gradient steps per environment step.

    Learning rates and `tau` are higher than most tasks bear; here, runs of 50,000 steps kept their return with them.
    """

    hidden_sizes = (64, 64)
    batch_size = 32
    replay_ratio = 96.0
    learning_rate = 2e-3
    actor_learning_rate = 2e-3
    tau = 0.02


def main() -> int:
    """Compose, show why, write the program, run it."""
    composer = Composer()
    composer.set_opt_metric("throughput")
    composer.set_actors(1, env=ENV, envs_per_actor=4)
    composer.set_train_function(learner=TD3Trainer)
    composer.set_replay(100_000, mode="prioritized", fanout=16)
    replay, learner = composer.run()
    print(composer.matrix, composer.placement, sep="\n\n")
    composer.save(FOLDER)
    program = composer.runtime_gen(
        replay=replay, learner=learner, path=FOLDER / "program.py", timesteps=12_000, run_dir=FOLDER
    )
    return run_generated(program, sys.argv[1:])


if __name__ == "__main__":
    run_program(main)
