"""The common base of the Replay Managers whose kernels are C++, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import ReplayError
from pearl.replay.arguments import (
    STATE_FORMAT,
    Selection,
    as_generations,
    as_indices,
    as_priorities,
    check_out,
    checked_state,
)
from pearl.replay.protocol import ReplayStateDict, ReplayStatistics, Sample

if TYPE_CHECKING:
    from pearl import _device, _native, _sycl

_as_sample: Callable[[tuple[np.ndarray, ...]], Sample] = partial(tuple.__new__, Sample)  # half the time of Sample(*...)


class KernelReplayManager:
    """ReplayManager on a kernel, which has a mutex and runs without the GIL."""

    def __init__(
        self, tree: _native.SumTree | _device.SumTree | _sycl.FpgaSumTree, capacity: int, selection: Selection
    ) -> None:
        self._tree, self._limit = tree, selection.max_times_sampled
        self.capacity, self.fanout, self.mode = capacity, selection.fanout, selection.mode

    @property
    def filled(self) -> int:
        """Slots written so far."""
        return self._tree.filled

    @property
    def total(self) -> int:
        """Sum of the quantised priorities (modes that keep none: `filled`)."""
        return self._tree.total

    @property
    def scale(self) -> int:
        """The power of two of one unit of priority."""
        return self._tree.scale

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
            check_out(out, batch_size)  # a better message, at a higher cost than the kernel's own checks
            raise
        return out

    def update(self, indices: ArrayLike, priorities: ArrayLike, generations: ArrayLike | None = None) -> int:
        """Set priorities `(n,)` where not stale and return how many; see ReplayManager."""
        try:
            return self._tree.update(indices, priorities, generations)
        except TypeError:  # the arrays must be converted; the kernel finds that out in half the time of Python
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
        described: ReplayStateDict = {"format": STATE_FORMAT, "mode": self.mode, "capacity": self.capacity}
        return {**described, "fanout": self.fanout, "max_times_sampled": self._limit, **saved}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Take over a saved state; see ReplayManager."""
        self._tree.load(checked_state(state, capacity=self.capacity, mode=self.mode, max_times_sampled=self._limit))

    def close(self) -> None:
        """Free the memory. May be repeated."""
        self._tree.close()
