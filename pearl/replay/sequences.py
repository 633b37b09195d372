"""Neighbouring steps of an item's episode: n-step returns, sequence slices, stacks of frames.

These are not stored: gathering follows the links that the Data Storage keeps between the items of each stream, one load
for each step, whatever the size of the storage.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import ReplayError
from pearl.replay.arguments import as_indices
from pearl.replay.storage import DataStorage, field_of
from pearl.spec import NEXT_OBS, OBS


class NStepReturns(NamedTuple):
    """n-step returns of `(batch,)` items.

    `reward` float32 is the sum of `steps` int64 discounted rewards (fewer than n if the episode ends before, or has no
    newer item yet). `last` int64 is the item whose next observation is bootstrapped from. `discount` float32 is
    `gamma**steps`, 0 where the episode terminated.
    """

    reward: np.ndarray
    last: np.ndarray
    steps: np.ndarray
    discount: np.ndarray


class Slices(NamedTuple):
    """Sequence slices: columns `(batch, length, *shape)`.

    `mask` `(batch, length)` bool is False after the end of an episode, where columns are zero. `indices`
    `(batch, length)` int64 are the items; where the mask is False, the last item is repeated.
    """

    columns: dict[str, np.ndarray]
    mask: np.ndarray
    indices: np.ndarray


class FrameStacks(NamedTuple):
    """Stacks of frames `(batch, k, *shape)`, oldest first.

    `complete` `(batch,)` bool is False where earlier frames of the episode were overwritten; they are padded like
    frames before the episode's beginning.
    """

    obs: np.ndarray
    next_obs: np.ndarray | None
    complete: np.ndarray


def n_step_returns(storage: DataStorage, indices: ArrayLike, n: int, gamma: float) -> NStepReturns:
    """Return the n-step returns from the items at `indices` `(batch,)` on; see NStepReturns.

    Equal to the result of `pearl.actors.n_step.NStepWindow` for the same steps. Raises ReplayError without streams.
    """
    if n < 1:
        raise ReplayError(f"n must be at least 1; found {n}.")
    return NStepReturns(*storage.n_step(indices, gamma ** np.arange(n + 1, dtype=np.float64)))


def gather_slices(storage: DataStorage, starts: ArrayLike, length: int, out: Slices | None = None) -> Slices:
    """Return `length` successive items from each of `starts` `(batch,)` on, up to the episode's end; see Slices.

    If `out` is given, its arrays are filled and it is returned. Raises ReplayError without streams, and for arrays that
    do not fit. `DataStorage.draw_starts` draws starts of whole slices.
    """
    slots = as_indices(starts)
    if length < 1:
        raise ReplayError(f"length must be at least 1; found {length}.")
    steps = (len(slots), length)
    if out is None:
        columns = {f.name: np.empty((*steps, *f.shape), f.dtype) for f in storage.spec.fields}
        out = Slices(columns, np.empty(steps, np.bool_), np.empty(steps, np.int64))
    else:
        _check_slices(storage, out, steps)
    storage.gather_steps(slots, out.columns, out.indices, out.mask, back=False)
    return out


def gather_stacks(
    storage: DataStorage, indices: ArrayLike, k: int, padding: Literal["zero", "repeat"] = "zero"
) -> FrameStacks:
    """Return the `k` newest frames up to each of `indices` `(batch,)`, of obs and next_obs; see FrameStacks.

    Frames before the episode's beginning are zeros, or repeat its first. Raises ReplayError without streams.
    """
    if padding not in ("zero", "repeat"):
        raise ReplayError(f'padding must be "zero" or "repeat"; found {padding!r}.')
    if k < 1:
        raise ReplayError(f"k must be at least 1; found {k}.")
    newest = as_indices(indices)
    frames = field_of(storage.spec, OBS)
    obs = np.empty((len(newest), k, *frames.shape), frames.dtype)
    slots, mask = np.empty((len(newest), k), np.int64), np.empty((len(newest), k), np.bool_)

    def gather() -> FrameStacks:
        found = storage.gather_steps(newest, {OBS: obs}, slots, mask, back=True, repeat=padding == "repeat")
        complete = (found == k) | (found == storage.positions(newest) + 1)
        if all(f.name != NEXT_OBS for f in storage.spec.fields):
            return FrameStacks(obs, None, complete)
        next_obs = np.empty_like(obs)
        next_obs[:, :-1] = obs[:, 1:]
        next_obs[:, -1] = storage.gather_column(NEXT_OBS, newest)
        return FrameStacks(obs, next_obs, complete)

    return storage.consistently(gather)


def _check_slices(storage: DataStorage, out: Slices, steps: tuple[int, int]) -> None:
    expected = {f.name: ((*steps, *f.shape), f.dtype) for f in storage.spec.fields}
    if set(out.columns) != set(expected):
        raise ReplayError(f"The columns of `out` must be {list(expected)}; found {list(out.columns)}.")
    found = {**out.columns, "mask": out.mask, "indices": out.indices}
    for name, (shape, dtype) in {**expected, "mask": (steps, "bool"), "indices": (steps, "int64")}.items():
        array = found[name]
        if array.shape != shape or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.writeable):
            raise ReplayError(
                f"{name!r} of `out` must be contiguous, writeable {dtype} of shape {shape}; "
                f"found {array.dtype} {array.shape}."
            )
