"""RLlib's DQN, and SAC with Learners in processes, with prioritized replay: the training half of `training_step`.

Each process has one thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from typing import Any

from benchmarks.peers.training import Case, Train, serve

EPISODE = 200  # steps of each episode that fills the replay
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def _start_ray(cpus: int) -> None:
    """Start Ray's own processes on all cores, so that they need not share the measured core."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")

    def end() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=100 * 2**20, _temp_dir=folder)
    os.sched_setaffinity(0, core)


def make(case: Case) -> tuple[str, Train]:
    """An algorithm whose replay buffer is full of random transitions, and its training steps.

    The timed loop is RLlib's own, configured to take no environment steps: it samples episodes by priority, lets its
    Learner make batches of them and train, and updates the priorities. The weights go to its environment runner once
    per call, not once per step.
    """
    if not case.hidden or case.algorithm != ("sac" if case.learners else "dqn"):
        raise NotImplementedError("only its DQN with linear layers is compared")
    import numpy as np
    import ray
    import torch
    from ray.rllib.algorithms.dqn import DQNConfig, dqn
    from ray.rllib.algorithms.sac import SACConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    logging.disable(logging.WARNING)
    _start_ray(1 + case.learners)
    torch.set_num_threads(1)
    config: Any = SACConfig() if case.algorithm == "sac" else DQNConfig().training(double_q=False, dueling=False)
    config = (
        config.environment(case.environment)
        .framework("torch")
        .env_runners(num_env_runners=0)
        .learners(num_learners=case.learners)
        .training(
            train_batch_size_per_learner=case.batch // max(1, case.learners),
            num_steps_sampled_before_learning_starts=0,
            replay_buffer_config={
                "type": "PrioritizedEpisodeReplayBuffer",
                "capacity": case.slots,
                "alpha": 0.6,
                "beta": 0.4,
            },
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=list(case.hidden), fcnet_activation="relu", head_fcnet_hiddens=[]
            )
        )
    )
    algorithm: Any = config.build_algo()
    rng = np.random.default_rng(1)
    size = algorithm.env_runner.env.single_observation_space.shape
    actions = algorithm.env_runner.env.single_action_space
    actions.seed(1)
    for _ in range(case.slots // EPISODE):
        algorithm.local_replay_buffer.add(
            [
                SingleAgentEpisode(
                    observations=list(rng.standard_normal((EPISODE + 1, *size), np.float32)),
                    actions=[actions.sample() for _ in range(EPISODE)],
                    rewards=list(rng.standard_normal(EPISODE)),
                    terminated=True,
                    len_lookback_buffer=0,
                )
            ]
        )
    algorithm.training_step()  # with environment steps: creates the metrics that later calls update

    def train(steps: int) -> None:
        dqn.calculate_rr_weights = lambda config: (0, steps)
        algorithm.training_step()

    return f"RLlib {ray.__version__}, prioritized replay", train


if __name__ == "__main__":
    serve(make)
