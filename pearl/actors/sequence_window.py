"""Sequences of steps over a vector of environments, as R2D2 stores them (Kapturowski et al. 2019, Sec. 2.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pearl.spec import ACTION, DISCOUNT, OBS, POSITION, REWARD, STATE, STEPS, TransitionSpec


class SequenceWindow:
    """The present sequence of each of `envs` environments, written out once it is complete or its episode ends.

    The next one begins with the last `overlap` steps of a complete one, so a sequence never crosses the border of two
    episodes. The return of each step spans up to `n` steps, but not more than are left in the sequence. The columns are
    those of `TransitionSpec.sequences`.
    """

    def __init__(self, transition: TransitionSpec, envs: int, n: int, gamma: float) -> None:
        assert transition.sequence is not None
        columns = {f.name: f for f in transition.fields}
        self._sequence, self._n = transition.sequence, n
        length = self._sequence.length
        self._obs = np.empty((envs, length, *transition.observation_shape), columns[OBS].dtype)
        self._action = np.empty((envs, *columns[ACTION].shape), columns[ACTION].dtype)
        self._reward = np.zeros((envs, length), np.float64)
        self._state = np.empty((envs, length, *columns[STATE].shape), np.float32)
        self._filled = np.zeros(envs, np.int64)
        self._position = np.zeros(envs, np.int64)  # of the sequence's first step in its episode
        self._discounts = gamma ** np.arange(n + 1)

    def push(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
        done: np.ndarray,
        real: np.ndarray,
        state: np.ndarray,
        out: Mapping[str, np.ndarray],
        row: int,
    ) -> int:
        """Add one step of every environment where `real`; write finished sequences to `out` from `row` on.

        All arrays are `(envs, ...)`; `done` is terminated or truncated; `next_obs` holds the last observation of an
        episode, never the first of the next; `state` `(envs, size)` float32 is the recurrent state before the step. At
        most one sequence of an environment is finished. Returns the next free row.
        """
        stepped = np.flatnonzero(real)
        place = stepped, self._filled[stepped]
        self._obs[place] = obs[stepped]
        self._action[place] = action[stepped]
        self._reward[place] = reward[stepped]
        self._state[place] = state[stepped]
        self._filled[stepped] += 1
        for env in stepped[(self._filled[stepped] == self._sequence.length) | done[stepped]]:
            self._emit(env, next_obs[env], bool(terminated[env]), out, row)
            row += 1
            if done[env]:
                self._filled[env] = self._position[env] = 0
            else:
                self._keep_overlap(env)
        return row

    def _emit(self, env: int, last_obs: np.ndarray, terminated: bool, out: Mapping[str, np.ndarray], row: int) -> None:
        count = int(self._filled[env])
        obs, reward, discount = out[OBS][row], out[REWARD][row], out[DISCOUNT][row]
        obs[:count], obs[count], obs[count + 1 :] = self._obs[env, :count], last_obs, 0
        out[ACTION][row][:count], out[ACTION][row][count:] = self._action[env, :count], 0
        total = np.zeros(count)
        for k in range(min(self._n, count)):
            total[: count - k] += self._discounts[k] * self._reward[env, k:count]
        reward[:count], reward[count:] = total, 0
        left = count - np.arange(count)
        steps = np.minimum(self._n, left)
        discount[:count], discount[count:] = self._discounts[steps], 0
        if terminated:
            discount[:count][steps == left] = 0
        out[STEPS][row][:count], out[STEPS][row][count:] = steps, 0
        out[STATE][row] = self._state[env, 0]
        out[POSITION][row] = self._position[env]

    def _keep_overlap(self, env: int) -> None:
        stride, overlap = self._sequence.stride, self._sequence.overlap
        for column in (self._obs, self._action, self._reward, self._state):
            column[env, :overlap] = column[env, stride:].copy()
        self._filled[env] = overlap
        self._position[env] += stride
