"""Compose and train a double DQN on CartPole-v1.

For another environment with discrete actions, such as Acrobot-v1 or LunarLander-v3, change only the line `ENV = ...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pearl import Composer
from pearl.algorithms import DQN
from pearl.exploration import EpsilonGreedy
from pearl.runtime import run_generated, run_program

ENV = "CartPole-v1"
FOLDER = Path("runs") / f"dqn-{ENV}"


class DQNTrainer(DQN):
    """Double DQN that solves CartPole-v1 and keeps it solved; docs/stability.md says what each setting is for."""

    hidden_sizes = (64, 64)
    layer_norm = True
    learning_rate = 2.3e-3
    n_step = 5
    replay_ratio = 32.0
    tau = 0.01
    exploration = EpsilonGreedy(start=1.0, end=0.04, steps=3_000)


def main() -> int:
    """Compose, show why, write the program, run it."""
    composer = Composer()
    composer.set_opt_metric("throughput")
    composer.set_actors(1, env=ENV)
    composer.set_train_function(learner=DQNTrainer)
    composer.set_replay(100_000, mode="prioritized", fanout=16)
    replay, learner = composer.run()
    print(composer.matrix, composer.placement, sep="\n\n")
    composer.save(FOLDER)
    # CartPole is solved at a mean return of 475. The margin makes it likely that other episodes reach 475 too. None
    # takes the threshold that the environment registered.
    program = composer.runtime_gen(
        replay=replay,
        learner=learner,
        path=FOLDER / "program.py",
        timesteps=50_000,
        run_dir=FOLDER,
        until_return=490.0 if ENV == "CartPole-v1" else None,
    )
    return run_generated(program, sys.argv[1:])


if __name__ == "__main__":
    run_program(main)
