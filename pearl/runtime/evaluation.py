"""Greedy evaluation of a policy."""

from __future__ import annotations

import contextvars
import functools
import logging
import math
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.action_masks import MaskReader
from pearl.actors.actions import EnvironmentActions
from pearl.actors.environment import close_envs, known_environment, make_single_envs
from pearl.actors.native_policy import NativePolicy
from pearl.actors.observations import require_shape
from pearl.algorithms.trainer import (
    RecurrentTrainer,
    TrainerLike,
    policy_snapshot,
    policy_tensors,
    set_evaluation_mode,
    storing,
    uses_masks,
)
from pearl.error_state import own_error_state
from pearl.errors import EnvError, PearlError
from pearl.lazy_torch import torch
from pearl.runtime.options import Options
from pearl.spec import ActorSpec

logger = logging.getLogger("pearl.runtime")

MOST_ENVS = 100  # that play at once
_ENVS_PER_CHECK = 8  # steps after which an evaluation looks whether it should stop


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


class EvaluationEnvs:
    """The environments in which a run is evaluated: made when first needed, and kept for all its evaluations.

    So their warnings appear once. Each episode starts with a seed; state that an environment keeps across resets
    carries over to the next evaluation. An episode ends after `most_steps` (0: never), or after the environment's own
    time limit where that is longer.
    """

    def __init__(self, spec: ActorSpec, most_steps: int = Options.eval_max_steps) -> None:
        self.spec = spec
        self.most_steps = most_steps
        self._envs: list[gym.Env[Any, Any]] = []
        self.call = contextvars.copy_context().run  # of their methods: NumPy keeps there what they set by np.seterr
        self.has_warned = False

    def first(self, count: int) -> list[gym.Env[Any, Any]]:
        """`count` environments, the same at each call. Raises EnvError where they cannot be made."""
        if (missing := count - len(self._envs)) > 0:
            # Separate environments: a vector would keep stepping those that are done.
            self._envs += self.call(make_single_envs, self.spec, missing)
        return self._envs[:count]

    def is_too_long(self, length: int) -> bool:
        """Whether to end an episode of `length` steps; warns the first time."""
        if not self.most_steps or length < self._longest:
            return False
        self.warn_of_length()
        return True

    def warn_of_length(self) -> None:
        """Say once that an episode was ended because it was too long."""
        if not self.has_warned:
            self.has_warned = True
            logger.warning(
                "An episode of %s did not end within %s steps of greedy evaluation. Such episodes are ended there, and "
                "count with the return so far. Register the environment with max_episode_steps, or set "
                "--eval-max-steps.",
                *(self.spec.env_name, f"{self._longest:,}"),
            )

    @functools.cached_property
    def _longest(self) -> int:
        known = known_environment(self.spec)
        return max(self.most_steps, (known and known.max_episode_steps) or 0)

    def close(self) -> None:
        """Close the environments; `first` makes new ones."""
        envs, self._envs = self._envs, []
        close_envs(self.spec.env_name, *envs)


def evaluate(
    trainer: TrainerLike,
    spec: ActorSpec,
    episodes: int,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    policy: NativePolicy | None = None,
    envs: EvaluationEnvs | None = None,
) -> Evaluation | None:
    """Play `episodes` greedy episodes and return all their returns; None if `should_stop` said so before the end.

    Up to a hundred environments play a fixed count of episodes each, so that short ones are not over-represented.
    A `policy`, if given, acts with the trainer's current weights; otherwise `trainer.get_action` acts, with the modules
    in evaluation mode. `envs`, if given, stay open; otherwise the function makes and closes its own. Raises EnvError
    with the environment's traceback if the environment fails, and then closes `envs`.
    """
    training = set_evaluation_mode(trainer)
    used = envs or EvaluationEnvs(spec)
    over = False
    try:
        stored = storing(trainer)
        if isinstance(trainer, RecurrentTrainer):
            from pearl.actors.torch_policy import RecurrentTorchPolicy

            recurrent = RecurrentTorchPolicy(trainer)
            found = play(
                lambda obs, state: recurrent.act_from(stored(obs), state),
                used,
                episodes,
                seed,
                should_stop,
                initial_state=recurrent.initial_state,
            )
            over = True
            return found
        if policy is None:
            act: Callable[..., np.ndarray] = _torch_policy(trainer)
        else:
            policy.load_weights(policy_snapshot(trainer))
            act = policy.act
        found = play(
            lambda obs, *masks: act(stored(obs), *masks),
            used,
            episodes,
            seed,
            should_stop,
            masked=uses_masks(trainer),
        )
        over = True
        return found
    finally:
        # Not train(): it would also reach submodules that the user froze.
        for module in training:
            module.training = True
        if envs is None or not over:
            used.close()


def _torch_policy(trainer: TrainerLike) -> Callable[..., np.ndarray]:
    device = next((t.device for t in policy_tensors(trainer)), torch.device("cpu"))

    def act(*arrays: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return trainer.get_action(*(torch.from_numpy(array).to(device) for array in arrays)).cpu().numpy()

    return act


def play(
    act: Callable[..., Any],
    envs: EvaluationEnvs,
    episodes: int,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    masked: bool = False,
    initial_state: Callable[[int], np.ndarray] | None = None,
) -> Evaluation | None:
    """Let `act` play `episodes` episodes, or fewer environments than a hundred in turn; None if `should_stop` said so.

    `act` takes contiguous observations `(envs, *obs)`, float32 or bytes, and returns actions `(envs, *action)`, those
    of Discrete spaces counted from 0; `masked`, it also takes action masks `(envs, choices)` bool. For a recurrent
    policy, `initial_state(envs)` gives states `(envs, size)`: `act` takes observations and states, and returns actions
    and the next states. Raises EnvError with the traceback if it or an environment fails.
    """
    try:
        return _play(act, envs, episodes, seed, should_stop, masked, initial_state)
    except PearlError:
        raise
    except (Exception, SystemExit) as error:  # an environment that calls sys.exit() does not end the run in silence
        detail = "".join(traceback.format_exception(error, limit=-8)).rstrip()
        name = envs.spec.env_name
        raise EnvError(f"The environment {name} or the policy failed in the evaluation.\n{detail}") from error


@own_error_state()
def _play(
    act: Callable[..., Any],
    made: EvaluationEnvs,
    episodes: int,
    seed: int,
    should_stop: Callable[[], bool],
    masked: bool,
    initial_state: Callable[[int], np.ndarray] | None,
) -> Evaluation | None:
    count = min(episodes, MOST_ENVS)
    left = np.full(count, episodes // count)
    left[: episodes % count] += 1
    envs = made.first(count)
    actions, observations = envs[0].action_space, envs[0].observation_space
    taken, is_number = EnvironmentActions(actions), isinstance(actions, spaces.Discrete)
    shape, name = observations.shape or (), made.spec.env_name
    obs = np.zeros((count, *shape), np.uint8 if observations.dtype == np.uint8 else np.float32)
    reader = MaskReader(actions, name) if masked else None
    masks = np.ones((count, 0 if reader is None else reader.choices), bool)
    first_state = np.empty((count, 0), np.float32) if initial_state is None else initial_state(count)
    state = first_state.copy()
    for number, env in enumerate(envs):
        seen, info = made.call(env.reset, seed=seed + number)
        obs[number] = require_shape(seen, shape, name)
        if reader is not None:
            masks[number] = reader.one(info)
    running, length = np.zeros(count), np.zeros(count, np.int64)
    returns: list[float] = []
    lengths: list[int] = []
    playing = np.arange(count)
    while len(playing):
        if should_stop():
            return None
        if obs.dtype != np.uint8 and not np.isfinite(obs[playing]).all():
            raise EnvError(_not_finite(name, "an observation"))
        if initial_state is not None:
            chosen, state[playing] = act(obs[playing], state[playing])
        else:
            chosen = act(obs[playing]) if reader is None else act(obs[playing], masks[playing])
        for number, action in zip(playing.tolist(), taken(chosen), strict=True):
            # All environments' steps may take a minute.
            if number % _ENVS_PER_CHECK == _ENVS_PER_CHECK - 1 and should_stop():
                return None
            # Of whole numbers Python's own, which environments check in a third of the time.
            seen, reward, terminated, truncated, info = made.call(
                envs[number].step, int(action) if is_number else action
            )
            obs[number] = require_shape(seen, shape, name)
            running[number] += float(reward)
            length[number] += 1
            if terminated or truncated or made.is_too_long(int(length[number])):
                if not math.isfinite(running[number]):
                    raise EnvError(_not_finite(name, "a reward"))
                returns.append(float(running[number]))
                lengths.append(int(length[number]))
                running[number], length[number] = 0.0, 0
                state[number] = first_state[number]
                left[number] -= 1
                if left[number]:
                    seen, info = made.call(envs[number].reset)
                    obs[number] = require_shape(seen, shape, name)
            if reader is not None and left[number]:
                masks[number] = reader.one(info)
        playing = playing[left[playing] > 0]
    return Evaluation(np.array(returns), np.array(lengths))


def _not_finite(env: str, what: str) -> str:
    return (
        f"{env} returned {what} that is NaN or infinite in an evaluation, whose score would mean nothing. Fix the "
        "environment, or clip its values with a gymnasium wrapper."
    )
