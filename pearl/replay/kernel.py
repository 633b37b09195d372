"""What the Replay Managers whose kernels are C++ have in common, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import ReplayError
from pearl.replay.arguments import STATE_FORMAT, as_generations, as_indices, as_priorities, check_out, checked_state
from pearl.replay.protocol import ReplayStateDict, ReplayStatistics, Sample
from pearl.spec import ReplayMode

if TYPE_CHECKING:
    from pearl import _native, _sycl

_as_sample: Callable[[tuple[np.ndarray, ...]], Sample] = partial(tuple.__new__, Sample)  # half the time of Sample(*...)


class KernelReplayManager:
    """ReplayManager on a kernel: one mutex inside, no GIL held while it works."""

    def __init__(
        self,
        tree: _native.SumTree | _sycl.SumTree | _sycl.FpgaSumTree,
        capacity: int,
        fanout: int,
        mode: ReplayMode,
        limit: int,
    ) -> None:
        self._tree = tree
        self._capacity, self._fanout, self._mode, self._limit = capacity, fanout, mode, limit

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
