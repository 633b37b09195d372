"""rltools' PPO with MKL, compiled for the case: collecting rollouts and training on them, in turn, in one process.

It steps any environment of Gymnasium with Box actions, scaled to [-1, 1]. Its compilation (half a minute) is not in
its rate.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """A compiled loop; a step of it is a rollout and the training on it."""
    import gymnasium as gym

    probe = gym.make(case.environment)
    if not isinstance(probe.action_space, gym.spaces.Box):
        raise NotImplementedError("its PPO takes Box actions alone")
    if case.vector or case.threads > 1:
        raise NotImplementedError("it steps environments one by one, in one thread")
    limit = probe.spec.max_episode_steps if probe.spec else None
    return loop_of(
        case,
        lambda: gym.wrappers.RescaleAction(gym.make(case.environment), -1.0, 1.0),
        EPISODE_STEP_LIMIT=limit,
    )


def loop_of(case: Case, environment: Any, **settings: Any) -> tuple[str, Train]:
    """Its PPO on an environment as `compile_loop` takes it."""
    from benchmarks.peers.rltools_build import compile_loop, version

    (width,) = set(case.hidden)
    layers = len(case.hidden) + 1
    loop, _ = compile_loop(
        "PPO",
        environment,
        mkl=True,
        N_EPOCHS=case.epochs,
        N_ENVIRONMENTS=case.envs,
        ON_POLICY_RUNNER_STEPS_PER_ENV=case.slots // case.envs,
        BATCH_SIZE=case.batch,
        STEP_LIMIT=2**40,
        ACTOR_HIDDEN_DIM=width,
        ACTOR_NUM_LAYERS=layers,
        ACTOR_ACTIVATION_FUNCTION=case.activation.upper(),
        CRITIC_HIDDEN_DIM=width,
        CRITIC_NUM_LAYERS=layers,
        CRITIC_ACTIVATION_FUNCTION=case.activation.upper(),
        **settings,
    )
    state = loop.State(1)

    def train(rollouts: int) -> None:
        for _ in range(rollouts):
            state.step()

    return f"{version()}, MKL", train


if __name__ == "__main__":
    serve(make)
