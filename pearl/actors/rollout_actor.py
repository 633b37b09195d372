"""An Actor of on-policy training: its part of a rollout, a message at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from pearl.actors.actor import (
    Actor,
    ActorSetup,
    CarriedState,
    RecurrentPolicy,
    RecurrentRolloutPolicy,
    VectorActor,
)
from pearl.error_state import own_error_state
from pearl.errors import EnvError, TrainerError
from pearl.rollout.columns import BONUS, END, ENDED, GOES_ON, LAST_VALUE, LOG_PROB, NO_STEP, VALUE
from pearl.spec import ACTION, ACTION_MASK, OBS, REWARD, STATE

if TYPE_CHECKING:
    from pearl.algorithms.trainer import TrainerLike


class RolloutActor(VectorActor):
    """Steps its environments by actions that the policy draws, for a whole horizon with the same weights.

    Rows of a message are `step * envs + environment`. Where a time limit ends an episode, the value of its last
    observation stands for the return of the steps cut off. The states of a recurrent policy go on from one message to
    the next, and begin again with each episode.
    """

    def __init__(
        self, setup: ActorSetup, trainer: TrainerLike | None = None, *, on_step: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(setup, trainer, on_step=on_step)
        assert setup.rollout is not None
        self._horizon, self._gamma = setup.rollout.horizon, setup.train.gamma
        space = self.envs.single_action_space
        self._draws_uniform = not isinstance(space, spaces.Box)
        self._noise_size = math.prod(space.shape or ())
        self._recurrent = self._recurrent_policy()
        self.reset(self._env_seed)

    def _recurrent_policy(self) -> RecurrentRolloutPolicy | None:
        """The policy if it is recurrent, else None; TrainerError unless declared sequences and policy agree."""
        declared, policy = self.transition.rollout_sequences is not None, self.policy
        if declared and isinstance(policy, RecurrentRolloutPolicy):
            return policy
        if declared or isinstance(policy, RecurrentPolicy):
            raise TrainerError(
                f"{type(self.trainer).__name__} must declare rollout_sequences and have the methods of "
                "pearl.algorithms.trainer.RecurrentRolloutTrainer, or neither, to collect rollouts. Derive it from "
                "pearl.algorithms.RecurrentPPO."
            )
        return None

    def reset(self, seed: int | None) -> None:
        """Start new episodes everywhere."""
        self._obs = self._first_observations(seed)
        recurrent = self._recurrent
        self._memory = None if recurrent is None else CarriedState(recurrent.initial_rollout_state(self._count))
        self._ended = np.zeros(self._count, bool)  # by the last step, where the next step only resets
        self._any_ended = False
        self._returns, self._lengths = np.zeros(self._count), np.zeros(self._count, np.int64)

    @own_error_state()
    def collect(self, message: Mapping[str, np.ndarray], longest_s: float = math.inf) -> int:
        """Run the whole horizon, however long it takes, into the arrays of a DCQ message; return the rows filled."""
        horizon, count = self._horizon, self._count
        rows = horizon * count
        columns = {f.name: message[f.name][:rows].reshape(horizon, count, *f.shape) for f in self.transition.fields}
        obs, action, reward = columns[OBS], columns[ACTION], columns[REWARD]
        log_prob, value, end, bonus = (columns[name] for name in (LOG_PROB, VALUE, END, BONUS))
        end[:], bonus[:] = GOES_ON, 0.0
        noise, masks = self._noise(horizon), columns.get(ACTION_MASK)
        explore, step, taken, on_step = self.policy.explore_into, self.envs.step, self._taken, self._on_step
        memory, states = self._memory, message.get(STATE)
        obs[0] = self._obs
        for t in range(horizon):
            drawn = action[t]
            if masks is not None:
                assert self._masks is not None
                masks[t] = self._masks
            if memory is None:
                explore(obs[t], noise[t], drawn, log_prob[t], value[t], self._masks)
            else:
                assert states is not None
                self._record_state(states, t, memory)
                drawn[:], log_prob[t], value[t] = self._explore_from(obs[t], noise[t], memory)
            next_obs, reward[t], terminated, truncated, info = self._in_envs(step, taken(drawn))
            done = terminated | truncated
            if self._mask_reader is not None:
                self._masks = self._mask_reader.batch(info, np.zeros_like(done) if self._same_step else done)
            if self._any_ended:
                end[t][self._ended], reward[t][self._ended] = NO_STEP, 0.0
                done &= ~self._ended
                self._any_ended = False
            if np.count_nonzero(done):
                end[t][done] = ENDED
                limited = np.flatnonzero(done & truncated & ~terminated)
                if len(limited):
                    bonus[t, limited] = self._gamma * self._values_after(limited, next_obs, info)
                if not self._same_step:
                    self._ended, self._any_ended = done, True
            if memory is not None:
                memory.clear(end[t] != GOES_ON)
            if t + 1 < horizon:
                obs[t + 1] = next_obs
            on_step()
        self._obs = np.array(next_obs, self._obs_dtype, order="C")
        message[LAST_VALUE][:] = self._values(self._obs, slice(None))
        self._check_finite(columns)
        steps = rows - int(np.count_nonzero(end == NO_STEP))
        self.env_steps += steps * self.setup.spec.count
        episodes = self._count_episodes(message, reward, end)
        message["counts"][:] = (episodes, steps, self.setup.index, self.policy_version)
        return rows

    def _record_state(self, states: np.ndarray, t: int, memory: CarriedState) -> None:
        """Keep the states before step `t` of the rollout if a sequence begins with it."""
        assert self.transition.rollout_sequences is not None
        number, within = divmod(t, self.transition.rollout_sequences.length)
        if within == 0:
            states[number] = memory.now

    def _explore_from(
        self, obs: np.ndarray, noise: np.ndarray, memory: CarriedState
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._recurrent is not None
        action, log_prob, value, memory.now = self._recurrent.explore_from(obs, noise, memory.now)
        return action, log_prob, value

    def _values(self, obs: np.ndarray, envs: np.ndarray | slice) -> np.ndarray:
        """The values of observations of the environments `envs`, of a recurrent policy in their states."""
        if self._memory is None:
            return self.policy.value(obs)
        assert self._recurrent is not None
        return self._recurrent.value_from(obs, self._memory.now[envs])

    def _noise(self, horizon: int) -> np.ndarray:
        shape = (horizon, self._count, self._noise_size)
        if self._draws_uniform:
            return self.rng.random(shape, np.float32)
        return self.rng.standard_normal(shape, np.float32)

    def _values_after(self, limited: np.ndarray, next_obs: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
        """The values of the last observations of the episodes that ended in the environments `limited`."""
        last = [self._last_obs(info, env) for env in limited.tolist()] if self._same_step else next_obs[limited]
        found = np.ascontiguousarray(np.stack(list(last)), self._obs_dtype)
        self._check_obs(found, limited)
        return self._values(found, limited)

    def _count_episodes(self, message: Mapping[str, np.ndarray], reward: np.ndarray, end: np.ndarray) -> int:
        """Write returns and lengths of the episodes that ended, in the order of their ends; return their number."""
        real = end != NO_STEP
        returns = np.cumsum(np.where(real, reward, 0.0), axis=0, dtype=np.float64) + self._returns
        lengths = np.cumsum(real, axis=0) + self._lengths
        before_return, before_length = np.zeros(self._count), np.zeros(self._count, np.int64)
        number = 0
        for t, env in np.argwhere(end == ENDED):
            message["episode_return"][number] = returns[t, env] - before_return[env]
            message["episode_length"][number] = lengths[t, env] - before_length[env]
            before_return[env], before_length[env] = returns[t, env], lengths[t, env]
            number += 1
        self._returns, self._lengths = returns[-1] - before_return, lengths[-1] - before_length
        return number

    def _check_finite(self, columns: Mapping[str, np.ndarray]) -> None:
        """Raise an error that names the first step and environment with a number that is not finite."""
        for name, column in columns.items():
            if column.dtype.kind != "f" or np.isfinite(column).all():
                continue
            per_env = np.isfinite(column).reshape(self._horizon, self._count, -1).all(axis=2)
            t = int(np.flatnonzero(~per_env.all(axis=1))[0])
            step = f", step {t} of the rollout"
            if name in (OBS, REWARD):
                raise EnvError(self._not_finite("an observation" if name == OBS else "a reward", column[t], step))
            env = int(np.flatnonzero(~per_env[t])[0])
            raise TrainerError(
                f"The policy's {name} is {column[t, env]} in environment {env} of actor {self.setup.index}{step}, with "
                f"the weights of version {self.policy_version}: training has diverged. A smaller learning rate or "
                "max_grad_norm may help; --resume continues from the last checkpoint."
            )


def make_actor(
    setup: ActorSetup, trainer: TrainerLike | None = None, *, on_step: Callable[[], None] = lambda: None
) -> VectorActor:
    """The actor that `setup` describes."""
    kind = Actor if setup.rollout is None else RolloutActor
    return kind(setup, trainer, on_step=on_step)
