"""rlox's DQN, SAC and TD3: sampling from its replay in Rust, training with torch. One thread.

DQN samples by priority and updates the priorities; its loss is squared. SAC and TD3 sample uniformly. rlox has no DDPG.
"""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """An algorithm whose replay is full of random transitions, and its updates, which take no environment steps."""
    if case.algorithm not in ("dqn", "sac", "td3") or not case.hidden:
        raise NotImplementedError("only its DQN, SAC and TD3 with linear layers are compared")
    import numpy as np
    import rlox
    import torch
    from rlox.algorithms import DQN, SAC, TD3

    torch.set_num_threads(1)
    if len(case.hidden) != 2 or len(set(case.hidden)) != 1:
        raise NotImplementedError("its networks have two hidden layers of the same width")
    kinds: dict[str, Any] = {"dqn": DQN, "sac": SAC, "td3": TD3}
    prioritized = case.algorithm == "dqn"
    settings = {"prioritized": True, "double_dqn": case.double} if prioritized else {}
    trainer = kinds[case.algorithm](
        case.environment, buffer_size=case.slots, batch_size=case.batch, hidden=case.hidden[0], **settings
    )
    rng = np.random.default_rng(1)
    for _ in range(case.slots):
        obs, next_obs = rng.standard_normal((2, trainer.obs_dim), np.float32)
        action = (
            rng.integers(0, trainer.act_dim, 1).astype(np.float32)
            if prioritized
            else rng.uniform(-trainer.act_high, trainer.act_high, trainer.act_dim).astype(np.float32)
        )
        row = (obs, action, float(rng.standard_normal()), bool(rng.random() < 0.01), False, next_obs)
        trainer.buffer.push(*row, **({"priority": 1.0} if prioritized else {}))
    numbers = itertools.count(1)  # also the seeds of its samples

    def train(steps: int) -> None:
        for _ in range(steps):
            number = next(numbers)
            if case.algorithm == "dqn":
                trainer._update(number, 2**40)
                if number % trainer.target_update_freq == 0:
                    trainer.target_network.load_state_dict(trainer.q_network.state_dict())
            elif case.algorithm == "td3":
                trainer._update(number, number)
            else:
                trainer._update(number)

    return f"rlox {rlox.__version__}, {'prioritized' if prioritized else 'uniform'} replay", train


if __name__ == "__main__":
    serve(make)
