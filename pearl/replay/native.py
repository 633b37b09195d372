"""The Replay Manager on the CPU, in C++."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from pearl import _native
from pearl.errors import CapacityError, ReplayError
from pearl.replay.arguments import (
    PRIORITY_MODES,
    STATE_FORMAT,
    TIME_MODES,
    as_generations,
    as_indices,
    as_priorities,
    check_out,
    check_selection,
    checked_state,
)
from pearl.replay.memory import free_memory
from pearl.replay.protocol import ReplayStateDict, ReplayStatistics, Sample
from pearl.spec import InitialPriority, ReplayMode

MOST_WORKERS = 256
_CAPACITY_MAX = 2**36
_INITIAL = {"max": _native.SumTree.INITIAL_MAX, "mean": _native.SumTree.INITIAL_MEAN}
_as_sample: Callable[[tuple[np.ndarray, ...]], Sample] = partial(tuple.__new__, Sample)  # half the time of Sample(*...)


class NativeReplayManager:
    """ReplayManager on `pearl._native.SumTree`: one mutex inside, no GIL held while it works.

    `workers` threads, the caller's own included, share batches of thousands (the paper's W); results do not depend on
    how many there are.
    """

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
        workers: int = 1,
    ) -> None:
        check_selection(mode, max_times_sampled, initial_priority)
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
            raise ReplayError(f"workers must be a whole number in [1, {MOST_WORKERS}]; found {workers!r}.")
        _check_memory(capacity, fanout, mode, drawn_in_turn=not replacement or max_times_sampled > 0)
        self._tree = _native.SumTree(
            capacity,
            fanout,
            mode,
            alpha,
            operator.index(seed) % 2**64,
            stratified=bool(stratified),
            replacement=bool(replacement),
            max_times_sampled=max_times_sampled,
            initial_priority=_INITIAL[initial_priority] if isinstance(initial_priority, str) else initial_priority,
            workers=workers,
        )
        self._capacity, self._fanout, self._mode, self._limit = capacity, fanout, mode, max_times_sampled

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._capacity

    @property
    def fanout(self) -> int:
        """Children per node of the sum tree."""
        return self._fanout

    @property
    def mode(self) -> ReplayMode:
        """How batches are selected."""
        return self._mode

    @property
    def filled(self) -> int:
        """Slots written so far."""
        return self._tree.filled

    @property
    def total(self) -> int:
        """Sum of the quantised priorities (modes that keep none: `filled`)."""
        return self._tree.total

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._tree.alpha

    @property
    def max_priority(self) -> float:
        """Running maximum of the finite priorities given, at least 1."""
        return self._tree.max_priority

    def insert(self, indices: ArrayLike, priorities: ArrayLike | None = None) -> None:
        """Put new items `(n,)` into slots; see ReplayManager."""
        slots = as_indices(indices)
        self._tree.insert(slots, None if priorities is None else as_priorities(priorities, len(slots)))

    def sample(self, batch_size: int, beta: float = 0.4, out: Sample | None = None) -> Sample:
        """Select `batch_size` slots; see ReplayManager."""
        if out is None:
            return _as_sample(self._tree.sample(batch_size, beta))
        if len(out.indices) != batch_size:
            check_out(out, batch_size)
        try:
            self._tree.sample_into(beta, out.indices, out.weights, out.generations)
        except (TypeError, ValueError, ReplayError):
            check_out(out, batch_size)  # which says more, but costs more than the kernel's own checks
            raise
        return out

    def sample_indices(self, batch_size: int) -> np.ndarray:
        """Draw the `(batch_size,)` int64 indices that `sample` would, without weights and generations."""
        return self._tree.sample_indices(batch_size)

    def update(self, indices: ArrayLike, priorities: ArrayLike, generations: ArrayLike | None = None) -> int:
        """Set priorities `(n,)` where not stale and return how many; see ReplayManager."""
        try:
            return self._tree.update(indices, priorities, generations)
        except TypeError:  # not yet in the kernel's form, which is checked there for half of what it costs here
            pass
        slots = as_indices(indices)
        count = len(slots)
        versions = None if generations is None else as_generations(generations, count)
        return self._tree.update(slots, as_priorities(priorities, count), versions)

    def retrieve(self, indices: ArrayLike) -> np.ndarray:
        """Return exact priorities `(n,)` float32."""
        return self._tree.retrieve(as_indices(indices))

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent and requantise every slot."""
        self._tree.set_alpha(alpha)

    def statistics(self) -> ReplayStatistics:
        """Counts so far."""
        return ReplayStatistics(**self._tree.statistics())

    def state_dict(self) -> ReplayStateDict:
        """Everything `load_state_dict` needs; arrays are copies."""
        saved = self._tree.save()
        for derived in ("filled", "total"):
            del saved[derived]
        described: ReplayStateDict = {"format": STATE_FORMAT, "mode": self._mode, "capacity": self._capacity}
        return {**described, "fanout": self._fanout, "max_times_sampled": self._limit, **saved}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Take over a saved state; see ReplayManager."""
        self._tree.load(checked_state(state, capacity=self._capacity, mode=self._mode, max_times_sampled=self._limit))

    def close(self) -> None:
        """Free the memory. May be repeated."""
        self._tree.close()

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
            f"A Replay Manager of {capacity:,} slots needs {needed / 1e9:,.1f} GB; {free / 1e9:,.1f} GB of memory are "
            "free. Lower `size`."
        )
