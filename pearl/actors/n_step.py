"""n-step returns over a vector of environments (Sutton 1988; as used in Rainbow)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pearl.spec import ACTION, DISCOUNT, NEXT_OBS, OBS, REWARD, TransitionSpec

_NOTHING: Mapping[str, np.ndarray] = {}


class NStepWindow:
    """The last `n` steps of `envs` environments, turned into transitions as soon as these are complete.

    A step that ends an episode completes every step still in the window: with the shorter return, and with discount 0
    if it terminated, or bootstrapping from the episode's last observation if it was truncated.
    """

    def __init__(self, transition: TransitionSpec, envs: int, n: int, gamma: float) -> None:
        columns = {f.name: f for f in transition.fields}
        self._n, self._envs = n, envs
        self._obs = np.empty((n, envs, *columns[OBS].shape), columns[OBS].dtype)
        self._action = np.empty((n, envs, *columns[ACTION].shape), columns[ACTION].dtype)
        self._reward = np.zeros((n, envs), np.float64)
        self._further = {f.name: np.empty((n, envs, *f.shape), f.dtype) for f in transition.further}
        self._of_last_step = {f.name for f in transition.further if f.n_step == "last"}
        self._discounts = gamma ** np.arange(n + 1)
        self._length = np.zeros(envs, np.int64)
        self._step = -1

    @property
    def most_rows(self) -> int:
        """Transitions that one `push` can complete at most."""
        return self._envs * self._n

    def push(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
        done: np.ndarray,
        real: np.ndarray,
        out: Mapping[str, np.ndarray],
        row: int,
        further: Mapping[str, np.ndarray] = _NOTHING,
    ) -> int:
        """Add one step of every environment where `real`; write completed transitions to `out` from `row` on.

        All arrays are `(envs, ...)`; `done` is terminated or truncated; `next_obs` holds the last observation of an
        episode, never the first of the next; `further` holds the columns that the algorithm added. Returns the next
        free row.
        """
        if self._n == 1:
            return self._push_single(obs, action, reward, next_obs, terminated, done, real, out, row, further)
        self._step += 1
        position = self._step % self._n
        self._obs[position] = obs
        self._action[position] = action
        self._reward[position] = reward
        for name, values in further.items():
            self._further[name][position] = values
        self._length[real] += 1
        whole = np.flatnonzero(real & ~done & (self._length == self._n))
        if len(whole):
            row = self._emit(whole, self._n, next_obs, np.zeros(len(whole), bool), out, row)
            self._length[whole] -= 1
        ended = np.flatnonzero(real & done)
        for length in range(self._n, 0, -1):
            rest = ended[self._length[ended] >= length] if len(ended) else ended
            if len(rest):
                row = self._emit(rest, length, next_obs, terminated[rest], out, row)
        self._length[ended] = 0
        return row

    def _push_single(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
        done: np.ndarray,
        real: np.ndarray,
        out: Mapping[str, np.ndarray],
        row: int,
        further: Mapping[str, np.ndarray],
    ) -> int:
        """Every step is a transition: nothing is kept, and where no episode ends all are copied as they lie."""
        goes_on = real & ~done
        discount: np.ndarray | float = self._discounts[1]
        if np.count_nonzero(goes_on) < self._envs:
            order = np.concatenate((np.flatnonzero(goes_on), np.flatnonzero(real & done)))
            obs, action, reward, next_obs = obs[order], action[order], reward[order], next_obs[order]
            discount = np.where(terminated[order], 0.0, discount)
            further = {name: values[order] for name, values in further.items()}
        end = row + len(obs)
        out[OBS][row:end] = obs
        out[ACTION][row:end] = action
        out[REWARD][row:end] = reward
        out[NEXT_OBS][row:end] = next_obs
        out[DISCOUNT][row:end] = discount
        for name, values in further.items():
            out[name][row:end] = values
        return end

    def _emit(
        self,
        envs: np.ndarray,
        length: int,
        next_obs: np.ndarray,
        terminated: np.ndarray,
        out: Mapping[str, np.ndarray],
        row: int,
    ) -> int:
        oldest = (self._step - length + 1) % self._n
        end = row + len(envs)
        total = np.zeros(len(envs))
        for k in range(length):
            total += self._discounts[k] * self._reward[(oldest + k) % self._n, envs]
        out[OBS][row:end] = self._obs[oldest, envs]
        out[ACTION][row:end] = self._action[oldest, envs]
        out[REWARD][row:end] = total
        out[NEXT_OBS][row:end] = next_obs[envs]
        out[DISCOUNT][row:end] = np.where(terminated, 0.0, self._discounts[length])
        for name, values in self._further.items():
            step = self._step % self._n if name in self._of_last_step else oldest
            out[name][row:end] = values[step, envs]
        return end
