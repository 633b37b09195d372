"""Stable-Baselines3's PPO: collecting rollouts and training on them, in turn, in one process."""

from __future__ import annotations

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """A model with a vector of environments one after the other; it has no form for an environment's own vector."""
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    torch.set_num_threads(case.threads)
    envs = make_vec_env(case.environment, n_envs=case.envs, seed=1)
    model = sb3.PPO(
        "MlpPolicy",
        envs,
        n_steps=case.slots // case.envs,
        batch_size=case.batch,
        n_epochs=case.epochs,
        policy_kwargs={"net_arch": list(case.hidden)},
        seed=1,
        device="cpu",
    )
    model.set_logger(configure(None, []))

    def train(rollouts: int) -> None:
        model.learn(rollouts * case.slots, reset_num_timesteps=False)

    return f"stable-baselines3 {sb3.__version__}, {case.threads} thread(s)", train


if __name__ == "__main__":
    serve(make)
