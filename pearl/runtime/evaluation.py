"""Greedy evaluation of a policy."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from pearl.actors.environment import autoreset_mode, make_vector_env
from pearl.algorithms.trainer import TrainerLike, policy_tensors, set_evaluation_mode
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
) -> Evaluation | None:
    """Play `episodes` greedy episodes and return all their returns; None if `should_stop` said so before the end.

    Every environment of the vector plays a fixed count of episodes, so that short ones are not over-represented.
    Modules are in evaluation mode meanwhile. Raises EnvError, with the environment's own traceback, where it fails.
    """
    training = set_evaluation_mode(trainer)
    try:
        return _play(trainer, spec, episodes, seed, should_stop)
    except PearlError:
        raise
    except Exception as error:
        detail = "".join(traceback.format_exception(error, limit=-8)).rstrip()
        raise EnvError(f"The environment {spec.env} or the policy failed in the evaluation.\n{detail}") from error
    finally:
        # Not train(), which would reach what the user froze inside.
        for module in training:
            module.training = True


def _play(
    trainer: TrainerLike, spec: ActorSpec, episodes: int, seed: int, should_stop: Callable[[], bool]
) -> Evaluation | None:
    count = min(episodes, _MOST_ENVS)
    quota = np.full(count, episodes // count)
    quota[: episodes % count] += 1
    envs = make_vector_env(dataclasses.replace(spec, vectorization="sync"), count)
    try:
        device = next((t.device for t in policy_tensors(trainer)), torch.device("cpu"))
        action_space = envs.single_action_space
        first_action = int(action_space.start) if isinstance(action_space, spaces.Discrete) else 0
        assert autoreset_mode(envs) is AutoresetMode.SAME_STEP
        obs, _ = envs.reset(seed=seed)
        dtype = np.uint8 if obs.dtype == np.uint8 else np.float32
        running = np.zeros(count)
        length = np.zeros(count, np.int64)
        played = np.zeros(count, np.int64)
        returns: list[float] = []
        lengths: list[int] = []
        while len(returns) < episodes:
            if should_stop():
                return None
            with torch.inference_mode():
                action = trainer.get_action(torch.from_numpy(np.asarray(obs, dtype)).to(device)).cpu().numpy()
            obs, reward, terminated, truncated, _ = envs.step(action + first_action if first_action else action)
            running += reward
            length += 1
            if length.max() > _LONGEST_EPISODE:
                raise EnvError(
                    f"An episode of {spec.env} did not end within {_LONGEST_EPISODE:,} steps of greedy evaluation. "
                    "Register the environment with max_episode_steps, or evaluate with --eval-episodes 0."
                )
            for env in np.flatnonzero(terminated | truncated):
                if played[env] < quota[env]:
                    returns.append(float(running[env]))
                    lengths.append(int(length[env]))
                    played[env] += 1
                running[env], length[env] = 0.0, 0
    finally:
        envs.close()
    return Evaluation(np.array(returns), np.array(lengths))
