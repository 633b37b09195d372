"""The contract of a Replay Manager on any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from pearl.spec import ReplayMode

ReplayStateDict: TypeAlias = "dict[str, np.ndarray | int | float | str]"


class Sample(NamedTuple):
    """One batch of slots, each array `(batch,)`: `indices` int64, `weights` float32 in (0, 1], `generations` uint32."""

    indices: np.ndarray
    weights: np.ndarray
    generations: np.ndarray


@dataclass(frozen=True)
class ReplayStatistics:
    """Counts since creation, in items; `scale` is the power of two of one unit of priority.

    `rescales` counts how often a large priority (or alpha) lowered the scale, `recoveries` how often it rose again.
    `exhausted` counts items that were sampled `max_times_sampled` times. `histogram[b]` counts the stored items whose
    quantised priority has `b` bits (0: never sampled; empty for modes without priorities). `samples_per_item` is the
    mean over the stored items, each counted up to 65,535. `age_mean` and `age_max` (in items inserted since, modulo
    2**32) and `effective_sample_size` (of the weights) describe the last batch; they are 0 before the first batch and
    after a restore.
    """

    filled: int
    total: int
    max_priority: float
    scale: int
    inserts: int
    updates: int
    samples: int
    stale: int
    saturated: int
    rescales: int
    recoveries: int
    exhausted: int
    histogram: tuple[int, ...]
    samples_per_item: float
    age_mean: float
    age_max: int
    effective_sample_size: float


class ReplayManager(Protocol):
    """Sum tree of priorities with exact integer arithmetic: same seed and calls, same samples on every device.

    Every method may be called from any thread. After `close`, each raises ReplayError.
    """

    @property
    def capacity(self) -> int:
        """Slots."""

    @property
    def filled(self) -> int:
        """Slots written so far."""

    @property
    def total(self) -> int:
        """Sum of the quantised priorities (modes that keep none: `filled`)."""

    @property
    def scale(self) -> int:
        """The power of two of one unit of priority: `total` stands for a sum of `total * 2**-scale`."""

    @property
    def fanout(self) -> int:
        """Children per node of the sum tree."""

    @property
    def mode(self) -> ReplayMode:
        """How batches are selected."""

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""

    @property
    def max_priority(self) -> float:
        """Running maximum of the finite priorities given, at least 1: what new items get by default."""

    def insert(self, indices: ArrayLike, priorities: ArrayLike | None = None) -> None:
        """Put new items `(n,)` into slots, with the initial priority if `priorities` is None.

        `priority_epsilon` is added to given priorities. Each occurrence of a slot gives it a new generation: the count
        of items inserted so far, including this one (modulo 2**32, never 0). Of duplicates, the last priority wins.
        Raises ReplayError for an index out of range and PriorityError for a NaN or negative priority, changing nothing.
        """

    def sample(self, batch_size: int, beta: float = 0.4, out: Sample | None = None) -> Sample:
        """Select `batch_size` slots, in mode "prioritized" with weights `(N P(i))**-beta` over their batch maximum.

        Modes "prioritized" and "uniform" draw at random; if stratified, the k-th item from the k-th of `batch_size`
        equal slices. Without replacement, no item comes twice in a batch; if also stratified, an item is in the batch
        with probability `batch_size * P(i)`, or for certain if that is 1 or more. The other modes take items in order,
        each once in a batch: "fifo" the oldest written, "lifo" the newest, "top_k" the highest priorities (of equal
        ones, the lower index first). Their weights, and those of "uniform", are 1.

        `out`, if given, is filled and returned. Never selects an unwritten slot, nor one that was sampled
        `max_times_sampled` times, nor (in modes with priorities) one of zero priority, unless all candidates are zero:
        then "prioritized" is uniform over them. Raises ReplayError, changing nothing, if nothing was inserted or too
        few items can be sampled.
        """

    def update(self, indices: ArrayLike, priorities: ArrayLike, generations: ArrayLike | None = None) -> int:
        """Set priorities `(n,)`, with `priority_epsilon` added, and return how many were applied.

        An item whose generation (as sampled) is stale, because the slot was overwritten since, is skipped and counted.
        Of duplicates, the last wins. Raises as `insert`, and ReplayError for unwritten slots.
        """

    def retrieve(self, indices: ArrayLike) -> np.ndarray:
        """Return exact priorities `(n,)` float32 as last set; 0 where nothing was written."""

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent and requantise every slot from its exact priority."""

    def statistics(self) -> ReplayStatistics:
        """Counts so far."""

    def state_dict(self) -> ReplayStateDict:
        """Everything that `load_state_dict` needs to continue with identical samples; arrays are copies."""

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Load a saved state; capacity, mode and `max_times_sampled` must match, the rest may differ.

        Raises CheckpointError, changing nothing, for a mismatch or damage.
        """

    def close(self) -> None:
        """Free the memory. May be repeated."""
