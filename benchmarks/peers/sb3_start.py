"""Stable-Baselines3 with the settings that its RL Zoo has tuned: tells when its first optimizer has made a step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.peers.sb3_solve import model_of
from benchmarks.peers.solving import FIRST_STEP
from benchmarks.peers.zoo_settings import ALGORITHMS, settings_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--collected", type=int, required=True, help="steps before the first one")
    parser.add_argument("--steps", type=int, required=True, help="environment steps in all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changed: dict[str, Any] = {} if options.algorithm == "ppo" else {"learning_starts": options.collected}
    settings, _ = settings_of(options.algorithm, options.environment)
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            print(FIRST_STEP, flush=True)

    register_optimizer_step_post_hook(tell)
    model_of(options.algorithm, options.environment, 1, {**settings, **changed}).learn(options.steps)


if __name__ == "__main__":
    main()
