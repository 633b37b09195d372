"""The Replay Manager on the CPU, in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pearl import _native
from pearl.errors import ReplayError
from pearl.replay.arguments import PRIORITY_MODES, TIME_MODES, Selection, SelectionOptions
from pearl.replay.kernel import KernelReplayManager
from pearl.replay.memory import check_slots_fit

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_WORKERS = 256
_INITIAL = {"max": _native.SumTree.INITIAL_MAX, "mean": _native.SumTree.INITIAL_MEAN}


class NativeReplayManager(KernelReplayManager):
    """ReplayManager on `pearl._native.SumTree`, which has a mutex and runs without the GIL.

    `workers` threads, including the caller's, share batches of thousands (the paper's W). Results do not depend on
    their number. For the other options see `pearl.replay.arguments.Selection`.
    """

    _tree: _native.SumTree

    def __init__(self, capacity: int, *, workers: int = 1, **options: Unpack[SelectionOptions]) -> None:
        chosen = Selection(**options)
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
            raise ReplayError(f"workers must be a whole number in [1, {MOST_WORKERS}]; found {workers!r}.")
        check_slots_fit(capacity, _slot_nbytes(chosen))
        initial = chosen.initial_priority
        tree = _native.SumTree(
            capacity,
            chosen.fanout,
            chosen.mode,
            chosen.alpha,
            chosen.seed64,
            stratified=bool(chosen.stratified),
            replacement=bool(chosen.replacement),
            max_times_sampled=chosen.max_times_sampled,
            initial_priority=_INITIAL[initial] if isinstance(initial, str) else initial,
            priority_epsilon=chosen.priority_epsilon,
            workers=workers,
        )
        super().__init__(tree, capacity, chosen)

    def sample_indices(self, batch_size: int) -> np.ndarray:
        """Draw the `(batch_size,)` int64 indices that `sample` would, without weights and generations."""
        return self._tree.sample_indices(batch_size)

    @property
    def native(self) -> _native.SumTree:
        """The kernel itself, for other kernels."""
        return self._tree

    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun:
        """Start a native thread that serves requests on this replay until stopped."""
        return _native.ReplayAutorun(self._tree, max_batch, depth)


def _slot_nbytes(selection: Selection) -> float:
    """Bytes of one slot with its share of the trees."""
    mode, slot = selection.mode, 10.0  # priority, generation, times sampled
    if mode in PRIORITY_MODES or not selection.replacement or selection.max_times_sampled > 0:
        slot += 4 + 8 / max(selection.fanout - 1, 1)  # a leaf, and its share of the sums
    if mode == "top_k":
        slot += 4 * 16 / 15  # the tree of maxima
    if mode in TIME_MODES:
        slot += 16  # the order of writing
    return slot
