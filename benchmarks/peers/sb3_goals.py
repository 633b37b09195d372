"""Stable-Baselines3's DQN with its HerReplayBuffer in the bit-flipping environment of `benchmarks.flip_bits`."""

from __future__ import annotations

import gymnasium as gym
import torch
from stable_baselines3 import DQN, HerReplayBuffer

from benchmarks import flip_bits as task
from benchmarks.peers.sb3_solve import Examination
from benchmarks.peers.solving import Examiner, parse


def main() -> None:
    given = parse(__doc__, bits=[str(bits) for bits in task.BITS])
    torch.set_num_threads(1)
    name = task.environment_of(int(given.bits))
    examiner = Examiner(name, task.return_of(int(given.bits)), given.seed)
    model = DQN(
        "MultiInputPolicy",
        gym.make(name),
        seed=given.seed,
        device="cpu",
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": task.GOALS, "goal_selection_strategy": "future"},
        buffer_size=task.SLOTS // (1 + task.GOALS),  # steps, of which ours hold as many
        batch_size=task.BATCH,
        learning_starts=task.STARTS,
        gamma=task.GAMMA,
        learning_rate=task.RATE,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=task.TARGETS,
        exploration_fraction=task.EXPLORING / task.STEPS,
        exploration_final_eps=task.LEAST_EPSILON,
        max_grad_norm=10.0,
        policy_kwargs={"net_arch": list(task.SIZES)},
    )
    model.learn(task.STEPS, callback=Examination(examiner))
    print(f"Steps: {model.num_timesteps}")


if __name__ == "__main__":
    main()
