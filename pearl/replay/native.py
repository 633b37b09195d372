"""The Replay Manager on the CPU, in C++."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from pearl import _native
from pearl.replay.arguments import STATE_FORMAT, as_generations, as_indices, as_priorities, check_out, checked_state
from pearl.replay.protocol import ReplayStateDict, ReplayStatistics, Sample
from pearl.spec import ReplayMode


class NativeReplayManager:
    """ReplayManager on `pearl._native.SumTree`: one mutex inside, no GIL held while it works."""

    def __init__(
        self, capacity: int, *, fanout: int = 16, mode: ReplayMode = "prioritized", alpha: float = 0.6, seed: int = 0
    ) -> None:
        self._tree = _native.SumTree(capacity, fanout, mode == "prioritized", alpha, operator.index(seed) % 2**64)
        self._capacity, self._fanout, self._mode = capacity, fanout, mode

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
        """Either "prioritized" or "uniform"."""
        return self._mode

    @property
    def filled(self) -> int:
        """Slots written so far."""
        return self._tree.filled

    @property
    def total(self) -> int:
        """Sum of the quantised priorities (uniform mode: `filled`)."""
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
        """Draw `batch_size` slots by priority; see ReplayManager."""
        if out is None:
            return Sample(*self._tree.sample(batch_size, beta))
        check_out(out, batch_size)
        self._tree.sample_into(beta, out.indices, out.weights, out.generations)
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
        state = self._tree.state()
        return ReplayStatistics(**{name: state[name] for name in ReplayStatistics.__dataclass_fields__})

    def state_dict(self) -> ReplayStateDict:
        """Everything `load_state_dict` needs; arrays are copies."""
        saved = self._tree.save()
        for derived in ("filled", "total"):
            del saved[derived]
        return {"format": STATE_FORMAT, "mode": self._mode, "capacity": self._capacity, "fanout": self._fanout, **saved}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Take over a saved state; see ReplayManager."""
        self._tree.load(checked_state(state, capacity=self._capacity, mode=self._mode))

    def close(self) -> None:
        """Free the memory. May be repeated."""
        self._tree.close()

    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun:
        """Start a native thread that serves requests on this replay until stopped."""
        return _native.ReplayAutorun(self._tree, max_batch, depth)
