"""Stable-Baselines3's DQN with its HerReplayBuffer in the bit-flipping environment of `benchmarks.goals`."""

from __future__ import annotations

import gymnasium as gym
import torch
from stable_baselines3 import DQN, HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks import goals
from benchmarks.peers.solving import Examiner, parse


class _Examination(BaseCallback):
    """Stops training when the policy passes."""

    def __init__(self, examiner: Examiner) -> None:
        super().__init__()
        self.examiner = examiner

    def _on_step(self) -> bool:
        if self.num_timesteps % self.examiner.interval:
            return True
        return not self.examiner.passes(lambda obs: self.model.predict(obs, deterministic=True)[0])


def main() -> None:
    given = parse(__doc__, bits=[str(bits) for bits in goals.BITS])
    torch.set_num_threads(1)
    name = goals.environment_of(int(given.bits))
    examiner = Examiner(name, goals.return_of(int(given.bits)), given.seed)
    model = DQN(
        "MultiInputPolicy",
        gym.make(name),
        seed=given.seed,
        device="cpu",
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": goals.GOALS, "goal_selection_strategy": "future"},
        buffer_size=goals.SLOTS // (1 + goals.GOALS),  # steps, of which ours hold as many
        batch_size=goals.BATCH,
        learning_starts=goals.STARTS,
        gamma=goals.GAMMA,
        learning_rate=goals.RATE,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=goals.TARGETS,
        exploration_fraction=goals.EXPLORING / goals.STEPS,
        exploration_final_eps=goals.LEAST_EPSILON,
        max_grad_norm=10.0,
        policy_kwargs={"net_arch": list(goals.SIZES)},
    )
    model.learn(goals.STEPS, callback=_Examination(examiner))
    print(f"Steps: {model.num_timesteps}")


if __name__ == "__main__":
    main()
