"""rlox's PPO: collecting rollouts and training on them, in turn, in one process.

It has a CartPole-v1 of its own, in Rust, which steps all copies at once: it takes part where the environment's own
vector is compared. Elsewhere it steps Gymnasium's, under another name.
"""

from __future__ import annotations

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """A trainer with networks of its own; its loop makes the statistics of episodes, which cannot be left out."""
    import gymnasium as gym
    import rlox
    import torch
    from rlox.algorithms.ppo import PPO

    if case.hidden != (64, 64):
        raise NotImplementedError("its PPO has networks of 64 x 64")
    torch.set_num_threads(case.threads)
    environment, how = case.environment, "its own vector in Rust"
    if not case.vector:
        environment, how = "GymnasiumEnv-v0", "Gymnasium's environments"
        known = gym.spec(case.environment)
        gym.register(
            environment, known.entry_point, max_episode_steps=known.max_episode_steps, kwargs=dict(known.kwargs)
        )
    trainer = PPO(
        environment,
        n_envs=case.envs,
        seed=1,
        n_steps=case.slots // case.envs,
        n_epochs=case.epochs,
        batch_size=case.batch,
        anneal_lr=False,
    )

    def train(rollouts: int) -> None:
        trainer.train(rollouts * case.slots)

    return f"rlox {rlox.__version__} ({how}), {case.threads} thread(s)", train


if __name__ == "__main__":
    serve(make)
