"""The Replay Manager on the CPU, in C++."""

from __future__ import annotations

import operator

import numpy as np

from pearl import _native
from pearl.byte_size import readable_size
from pearl.errors import CapacityError, ReplayError
from pearl.replay.arguments import PRIORITY_MODES, TIME_MODES, check_epsilon, check_selection
from pearl.replay.kernel import KernelReplayManager
from pearl.replay.memory import free_memory
from pearl.spec import InitialPriority, ReplayMode

MOST_WORKERS = 256
_CAPACITY_MAX = 2**36
_INITIAL = {"max": _native.SumTree.INITIAL_MAX, "mean": _native.SumTree.INITIAL_MEAN}


class NativeReplayManager(KernelReplayManager):
    """ReplayManager on `pearl._native.SumTree`: one mutex inside, no GIL held while it works.

    `workers` threads, the caller's own included, share batches of thousands (the paper's W); results do not depend on
    how many there are.
    """

    _tree: _native.SumTree

    def __init__(
        self,
        capacity: int,
        *,
        fanout: int = 16,
        mode: ReplayMode = "prioritized",
        alpha: float = 0.6,
        seed: int = 0,
        stratified: bool = True,
        replacement: bool = True,
        max_times_sampled: int = 0,
        initial_priority: InitialPriority = "max",
        priority_epsilon: float = 0.0,
        workers: int = 1,
    ) -> None:
        check_selection(mode, max_times_sampled, initial_priority)
        check_epsilon(priority_epsilon)
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
            raise ReplayError(f"workers must be a whole number in [1, {MOST_WORKERS}]; found {workers!r}.")
        _check_memory(capacity, fanout, mode, drawn_in_turn=not replacement or max_times_sampled > 0)
        tree = _native.SumTree(
            capacity,
            fanout,
            mode,
            alpha,
            operator.index(seed) % 2**64,
            stratified=bool(stratified),
            replacement=bool(replacement),
            max_times_sampled=max_times_sampled,
            initial_priority=_INITIAL[initial_priority] if isinstance(initial_priority, str) else initial_priority,
            priority_epsilon=priority_epsilon,
            workers=workers,
        )
        super().__init__(tree, capacity, fanout, mode, max_times_sampled)

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


def _check_memory(capacity: int, fanout: int, mode: ReplayMode, *, drawn_in_turn: bool) -> None:
    """Raise CapacityError where the slots and their trees need more memory than is free.

    Memory is committed as it is written to, so that without this a replay too large would end with the process.
    """
    if not 1 <= operator.index(capacity) <= _CAPACITY_MAX:
        return  # the kernel refuses that with its own words
    slot = 10.0  # priority, generation, times sampled
    if mode in PRIORITY_MODES or drawn_in_turn:
        slot += 4 + 8 / max(fanout - 1, 1)  # a leaf, and its share of the sums
    if mode == "top_k":
        slot += 4 * 16 / 15  # the tree of maxima
    if mode in TIME_MODES:
        slot += 16  # the order of writing
    needed, free = capacity * slot, free_memory()
    if needed > free:
        raise CapacityError(
            f"A Replay Manager of {capacity:,} slots needs {readable_size(needed)}; {readable_size(free)} of memory "
            "are free. Lower `size`."
        )
