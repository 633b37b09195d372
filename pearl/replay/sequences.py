"""Steps before and after an item, in its own episode: n-step returns, sequence slices, stacks of frames.

Nothing is stored for them: they are found at gather time from the links that the Data Storage keeps between the items
of each stream, in as many loads as there are steps, however large the storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import ReplayError
from pearl.spec import NEXT_OBS, OBS, REWARD

if TYPE_CHECKING:
    from pearl.replay.storage import DataStorage


class NStepReturns(NamedTuple):
    """n-step returns of `(batch,)` items.

    `reward` float32 is the sum of `steps` int64 discounted rewards (fewer than n where the episode ends or the newest
    item comes first); `last` int64 is the item whose next observation to bootstrap from; `discount` float32 is
    `gamma**steps`, 0 where the episode terminated.
    """

    reward: np.ndarray
    last: np.ndarray
    steps: np.ndarray
    discount: np.ndarray


class Slices(NamedTuple):
    """Sequence slices: columns `(batch, length, *shape)`.

    `mask` `(batch, length)` bool is False after the end of an episode, where columns are zero. `indices`
    `(batch, length)` int64 are the items; where the mask is False, the last one repeated.
    """

    columns: dict[str, np.ndarray]
    mask: np.ndarray
    indices: np.ndarray


class FrameStacks(NamedTuple):
    """Stacks of frames `(batch, k, *shape)`, oldest first.

    `complete` `(batch,)` bool is False where earlier frames of the episode were overwritten, and padded like those
    before its beginning.
    """

    obs: np.ndarray
    next_obs: np.ndarray | None
    complete: np.ndarray


def n_step_returns(storage: DataStorage, indices: ArrayLike, n: int, gamma: float) -> NStepReturns:
    """Return the n-step returns from the items at `indices` `(batch,)` on; see NStepReturns.

    Equal to what `pearl.actors.n_step.NStepWindow` makes of the same steps. Raises ReplayError without streams.
    """
    if n < 1:
        raise ReplayError(f"n must be at least 1; found {n}.")
    reward_column = _column(storage, REWARD)
    return storage.consistently(lambda: _n_step_returns(storage, reward_column, indices, n, gamma))


def _n_step_returns(
    storage: DataStorage, reward_column: np.ndarray, indices: ArrayLike, n: int, gamma: float
) -> NStepReturns:
    slots, steps = storage.steps_after(indices, n)
    discounts = gamma ** np.arange(n + 1)
    rewards = reward_column[slots]
    total = np.zeros(len(slots))
    for k in range(n):
        total += np.where(k < steps, discounts[k] * rewards[:, k].astype(np.float64), 0.0)
    last = np.ascontiguousarray(slots[:, -1])
    discount = np.where(storage.terminated(last), 0.0, discounts[steps])
    return NStepReturns(total.astype(np.float32), last, steps, discount.astype(np.float32))


def gather_slices(storage: DataStorage, starts: ArrayLike, length: int) -> Slices:
    """Return `length` successive items from each of `starts` `(batch,)` on, ending with the episode; see Slices.

    Raises ReplayError without streams. For starts of whole slices see `DataStorage.draw_starts`.
    """

    def gather() -> Slices:
        indices, found = storage.steps_after(starts, length)
        mask = np.arange(length) < found[:, None]
        columns = {}
        for name, rows in storage.gather(indices.reshape(-1)).items():
            columns[name] = rows.reshape(*indices.shape, *rows.shape[1:])
            columns[name][~mask] = 0
        return Slices(columns, mask, indices)

    return storage.consistently(gather)


def gather_stacks(
    storage: DataStorage, indices: ArrayLike, k: int, padding: Literal["zero", "repeat"] = "zero"
) -> FrameStacks:
    """Return the `k` newest frames up to each of `indices` `(batch,)`, of obs and next_obs; see FrameStacks.

    Before the episode's beginning, frames are zeros, or repeat the first. Raises ReplayError without streams.
    """
    if padding not in ("zero", "repeat"):
        raise ReplayError(f'padding must be "zero" or "repeat"; found {padding!r}.')
    frames = _column(storage, OBS)
    has_next = any(f.name == NEXT_OBS for f in storage.spec.fields)

    def gather() -> FrameStacks:
        slots, found = storage.steps_before(indices, k)
        obs = frames[slots]
        if padding == "zero":
            obs[np.arange(k) < k - found[:, None]] = 0
        complete = (found == k) | storage.begins_episode(np.ascontiguousarray(slots[:, 0]))
        if not has_next:
            return FrameStacks(obs, None, complete)
        newest = storage.gather_column(NEXT_OBS, np.ascontiguousarray(slots[:, -1]))
        return FrameStacks(obs, np.concatenate([obs[:, 1:], newest[:, None]], axis=1), complete)

    return storage.consistently(gather)


def _column(storage: DataStorage, name: str) -> np.ndarray:
    column = storage.stored_column(name)
    if column is None:
        raise ReplayError(f"Transitions have no column {name!r}; they have {[f.name for f in storage.spec.fields]}.")
    return column
