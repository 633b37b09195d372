"""rltools' PPO with MKL, compiled for the case: collecting rollouts and training on them, in turn, in one process.

It steps any environment of Gymnasium with Box actions, scaled to [-1, 1]. Its compilation (half a minute) is not in
its rate.
"""

from __future__ import annotations

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """A compiled loop; a step of it is a rollout and the training on it."""
    import gymnasium as gym

    from benchmarks.peers.rltools_build import compile_loop, version

    probe = gym.make(case.environment)
    if not isinstance(probe.action_space, gym.spaces.Box):
        raise NotImplementedError("its PPO takes Box actions alone")
    if case.vector or case.threads > 1:
        raise NotImplementedError("it steps environments one by one, in one thread")
    (width,) = set(case.hidden)
    layers = len(case.hidden) + 1
    loop, _ = compile_loop(
        "PPO",
        lambda: gym.wrappers.RescaleAction(gym.make(case.environment), -1.0, 1.0),
        mkl=True,
        N_EPOCHS=case.epochs,
        N_ENVIRONMENTS=case.envs,
        ON_POLICY_RUNNER_STEPS_PER_ENV=case.slots // case.envs,
        BATCH_SIZE=case.batch,
        STEP_LIMIT=2**40,
        EPISODE_STEP_LIMIT=probe.spec.max_episode_steps if probe.spec else None,
        ACTOR_HIDDEN_DIM=width,
        ACTOR_NUM_LAYERS=layers,
        ACTOR_ACTIVATION_FUNCTION="TANH",
        CRITIC_HIDDEN_DIM=width,
        CRITIC_NUM_LAYERS=layers,
        CRITIC_ACTIVATION_FUNCTION="TANH",
    )
    state = loop.State(1)

    def train(rollouts: int) -> None:
        for _ in range(rollouts):
            state.step()

    return f"{version()}, MKL", train


if __name__ == "__main__":
    serve(make)
