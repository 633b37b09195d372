"""Greedy evaluation of a policy."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from pearl.actors.environment import make_vector_env
from pearl.actors.native_policy import NativePolicy
from pearl.algorithms.trainer import TrainerLike, policy_snapshot, policy_tensors, set_evaluation_mode
from pearl.errors import EnvError, PearlError
from pearl.spec import ActorSpec

_MOST_ENVS = 100
_LONGEST_EPISODE = 200_000  # steps; beyond, an environment without a time limit would never let a run end


class Evaluation(NamedTuple):
    """Returns `(episodes,)` and lengths of greedy episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(self.returns.std())


def evaluate(
    trainer: TrainerLike,
    spec: ActorSpec,
    episodes: int,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    policy: NativePolicy | None = None,
) -> Evaluation | None:
    """Play `episodes` greedy episodes and return all their returns; None if `should_stop` said so before the end.

    Up to a hundred environments play a fixed count of episodes each, so that short ones are not over-represented.
    With a `policy`, which takes the trainer's weights of now, that one acts; otherwise `trainer.get_action`, its
    modules in evaluation mode meanwhile. Raises EnvError, with the environment's own traceback, where it fails.
    """
    training = set_evaluation_mode(trainer)
    try:
        if policy is None:
            return _play(_torch_policy(trainer), spec, episodes, seed, should_stop)
        policy.load_weights(policy_snapshot(trainer))
        return _play(policy.act, spec, episodes, seed, should_stop)
    except PearlError:
        raise
    except Exception as error:
        detail = "".join(traceback.format_exception(error, limit=-8)).rstrip()
        raise EnvError(f"The environment {spec.env} or the policy failed in the evaluation.\n{detail}") from error
    finally:
        # Not train(), which would reach what the user froze inside.
        for module in training:
            module.training = True


def _torch_policy(trainer: TrainerLike) -> Callable[[np.ndarray], np.ndarray]:
    device = next((t.device for t in policy_tensors(trainer)), torch.device("cpu"))

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return trainer.get_action(torch.from_numpy(obs).to(device)).cpu().numpy()

    return act


def _play(
    act: Callable[[np.ndarray], np.ndarray],
    spec: ActorSpec,
    episodes: int,
    seed: int,
    should_stop: Callable[[], bool],
) -> Evaluation | None:
    count = min(episodes, _MOST_ENVS)
    left = np.full(count, episodes // count)
    left[: episodes % count] += 1
    vector = make_vector_env(dataclasses.replace(spec, vectorization="sync"), count)
    try:
        # Stepped one by one, for the vector would go on with those that are done.
        assert isinstance(vector, gym.vector.SyncVectorEnv)
        envs, actions = vector.envs, vector.single_action_space
        first_action = int(actions.start) if isinstance(actions, spaces.Discrete) else None
        observations = vector.single_observation_space
        obs = np.zeros((count, *(observations.shape or ())), np.uint8 if observations.dtype == np.uint8 else np.float32)
        for number, env in enumerate(envs):
            obs[number], _ = env.reset(seed=seed + number)
        running, length = np.zeros(count), np.zeros(count, np.int64)
        returns: list[float] = []
        lengths: list[int] = []
        playing = np.arange(count)
        while len(playing):
            if should_stop():
                return None
            chosen = act(obs[playing])
            for number, action in zip(playing.tolist(), chosen, strict=True):
                # Of whole numbers Python's own, which environments check in a third of the time.
                taken = action if first_action is None else int(action) + first_action
                obs[number], reward, terminated, truncated, _ = envs[number].step(taken)
                running[number] += float(reward)
                length[number] += 1
                if terminated or truncated:
                    returns.append(float(running[number]))
                    lengths.append(int(length[number]))
                    running[number], length[number] = 0.0, 0
                    left[number] -= 1
                    if left[number]:
                        obs[number], _ = envs[number].reset()
            if length.max() > _LONGEST_EPISODE:
                raise EnvError(
                    f"An episode of {spec.env} did not end within {_LONGEST_EPISODE:,} steps of greedy evaluation. "
                    "Register the environment with max_episode_steps, or evaluate with --eval-episodes 0."
                )
            playing = playing[left[playing] > 0]
    finally:
        vector.close()
    return Evaluation(np.array(returns), np.array(lengths))
