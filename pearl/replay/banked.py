"""A replay in L banks, each with a sum tree of its own (banked prioritized replay, thesis Sec. 5.2.2.1).

Each bank gives an equal part of every batch, whatever its priorities, so that L Learners may sample at the same time.
Row i of bank j then comes with probability `q_i / (L S_j)` in place of `q_i / S`: q are priorities to the power of
alpha, S_j is their sum over the bank, and S that over all banks. An importance weight `w_i` of one tree becomes

    w_i * (q_i / S) / (q_i / (L S_j)) = w_i * L S_j / S

and the weighted mean of a batch has the same expectation as with one tree, for every beta (docs/local_sgd.md has the
derivation). Eq. 5.4 of the thesis has S_j / S, without L, and replaces it by a constant: it assumes that all S_j are
equal.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from pearl import _native
from pearl.errors import CheckpointError, ReplayError
from pearl.replay.arguments import (
    COUNTERS,
    as_generations,
    as_indices,
    as_priorities,
    check_indices,
    check_out,
    check_priorities,
)
from pearl.replay.protocol import ReplayManager, ReplayStateDict, ReplayStatistics, Sample
from pearl.spec import ReplayMode

Spread: TypeAlias = Literal["round_robin", "shard"]
MODES = ("prioritized", "uniform")


@dataclass(frozen=True)
class BankBatch:
    """The quantities outside of one bank's batch on which its weights depend.

    `mass` is the sum of the bank's priorities to the power of alpha (mode "uniform": its filled slots). `least` is the
    smallest such priority in the batch, whose weight is 1 (mode "uniform": 1).
    """

    mass: float
    least: float


def sample_bank(bank: ReplayManager, batch_size: int, beta: float) -> tuple[Sample, BankBatch]:
    """Sample one bank: the batch with the bank's own weights, and the `BankBatch` for `weight_factors`.

    Nobody else may change the bank meanwhile. Raises as `ReplayManager.sample`.
    """
    total, scale = bank.total, bank.scale
    drawn = bank.sample(batch_size, beta)
    if bank.mode == "uniform":
        return drawn, BankBatch(float(total), 1.0)
    if total == 0:  # drawn uniformly
        return drawn, BankBatch(0.0, 0.0)
    (priority,) = bank.retrieve(drawn.indices[[int(drawn.weights.argmax())]])
    (leaf,) = _native.quantise(np.array([priority], np.float32), bank.alpha, scale)
    return drawn, BankBatch(math.ldexp(float(total), -scale), math.ldexp(float(leaf), -scale))


def weight_factors(banks: Sequence[BankBatch], beta: float) -> np.ndarray:
    """Return the factors `(L,)` float64 that turn each bank's weights into the weights of all banks together.

    Weights of a bank, as it returns them, are divided by the largest of its batch. The factors undo that, apply
    `L S_j / S`, and leave one constant for all banks, by which the largest weight of bank j is at most `L S_j / S`. A
    bank whose priorities are all zero gets 0, unless those of all banks are: then all get 1.
    """
    mass = np.array([bank.mass for bank in banks], np.float64)
    if not mass.any():
        return np.ones(len(banks))
    least = np.array([bank.least for bank in banks], np.float64)
    smallest = least[mass > 0].min()
    factors = np.zeros(len(banks))
    drawn = mass > 0
    factors[drawn] = (smallest / least[drawn]) ** beta * (len(banks) * mass[drawn] / mass.sum())
    return factors


class BankedReplayManager:
    """ReplayManager over `banks`, of any backend and all of one capacity; sampling takes an equal part from each.

    Slots are spread over the banks by `spread`: "round_robin", slot s is in bank `s % L`, so that rows inserted in
    order reach all banks in turn; "shard", bank j has the slots from `j * capacity / L` on, for sources that write to a
    shard of their own. Row k of a batch of B comes from bank `k // (B / L)`.

    Differences from one tree: a batch must be a multiple of L, and every bank needs an item before the first is drawn;
    generations count insertions into the bank; items without a priority get the initial one of their bank, such as its
    running maximum. If all priorities of a bank are zero, and not those of all, its part of the batch has weight 0.

    Banks belong to the manager from now on. They must draw with replacement and without a limit of samples per item,
    which `make_banked_replay_manager` sees to. Raises ReplayError for no banks, banks that differ, and other modes.
    """

    def __init__(self, banks: Sequence[ReplayManager], *, spread: Spread = "round_robin") -> None:
        if not banks:
            raise ReplayError("A banked replay needs at least one bank; found none.")
        if spread not in get_args(Spread):
            raise ReplayError(f"spread must be one of {', '.join(get_args(Spread))}; found {spread!r}.")
        for number, bank in enumerate(banks):
            for name in ("capacity", "mode", "fanout", "alpha"):
                expected, found = getattr(banks[0], name), getattr(bank, name)
                if expected != found:
                    raise ReplayError(
                        f"Banks must be alike: {name} of bank {number} is {found!r}, that of bank 0 {expected!r}."
                    )
        if banks[0].mode not in MODES:
            raise ReplayError(
                f"Banks draw at random, in mode {' or '.join(MODES)}; found {banks[0].mode!r}, which takes items in "
                "the order of the whole replay. Use one Replay Manager."
            )
        self._banks = tuple(banks)
        self._spread = spread
        self._each = banks[0].capacity
        self._lock = threading.RLock()

    @property
    def banks(self) -> int:
        """Count of banks (L)."""
        return len(self._banks)

    @property
    def capacity(self) -> int:
        """Slots over all banks."""
        return self._each * len(self._banks)

    @property
    def filled(self) -> int:
        """Slots written so far."""
        return sum(bank.filled for bank in self._banks)

    @property
    def scale(self) -> int:
        """The power of two of one unit of `total`: the lowest of the banks."""
        return min(bank.scale for bank in self._banks)

    @property
    def total(self) -> int:
        """Sum of the banks' totals, in units of the lowest scale."""
        with self._lock:
            lowest = self.scale
            return sum(bank.total >> (bank.scale - lowest) for bank in self._banks)

    @property
    def fanout(self) -> int:
        """Children per node of each sum tree."""
        return self._banks[0].fanout

    @property
    def mode(self) -> ReplayMode:
        """How batches are selected."""
        return self._banks[0].mode

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._banks[0].alpha

    @property
    def max_priority(self) -> float:
        """The largest running maximum of the banks."""
        return max(bank.max_priority for bank in self._banks)

    def bank_of(self, indices: np.ndarray) -> np.ndarray:
        """The bank of each slot, `(n,)` int64."""
        bank: np.ndarray = indices % self.banks if self._spread == "round_robin" else indices // self._each
        return bank

    def insert(self, indices: ArrayLike, priorities: ArrayLike | None = None) -> None:
        """Put new items `(n,)` into slots, with the initial priority of their bank if `priorities` is None.

        Raises as `ReplayManager.insert`, for an index out of range before anything is changed.
        """
        slots = as_indices(indices)
        values = None if priorities is None else as_priorities(priorities, len(slots))
        with self._lock:
            check_indices(slots, self.capacity)
            if values is not None:
                check_priorities(values)
            for bank, rows, local in self._by_bank(slots):
                bank.insert(local, None if values is None else values[rows])

    def sample(self, batch_size: int, beta: float = 0.4, out: Sample | None = None) -> Sample:
        """Select `batch_size / L` slots of each bank; weights, in [0, 1], are corrected for the banks.

        Raises ReplayError, changing nothing, for a batch that is no multiple of L, or a bank that is empty.
        """
        batch_size = operator.index(batch_size)
        each = share_of_batch(batch_size, self.banks)
        if out is not None:
            check_out(out, batch_size)
        with self._lock:
            empty = [str(number) for number, bank in enumerate(self._banks) if bank.filled == 0]
            if empty:
                raise ReplayError(
                    f"Each of the {self.banks} banks must have an item before one can be sampled; empty: "
                    f"{', '.join(empty)}. Insert at least {self.banks} items in a row first."
                )
            drawn, batches = zip(*(sample_bank(bank, each, beta) for bank in self._banks), strict=True)
        factors = weight_factors(batches, beta)
        weights = np.concatenate([d.weights * factor for d, factor in zip(drawn, factors, strict=True)])
        found = Sample(
            np.concatenate([self._global(number, d.indices) for number, d in enumerate(drawn)]),
            (weights / weights.max()).astype(np.float32),
            np.concatenate([d.generations for d in drawn]),
        )
        if out is None:
            return found
        for target, source in zip(out, found, strict=True):
            target[...] = source
        return out

    def update(self, indices: ArrayLike, priorities: ArrayLike, generations: ArrayLike | None = None) -> int:
        """Set priorities `(n,)` where not stale and return how many; see ReplayManager.

        An index that was never inserted is found by its bank, when banks before it were updated.
        """
        slots = as_indices(indices)
        count = len(slots)
        values = as_priorities(priorities, count)
        versions = None if generations is None else as_generations(generations, count)
        with self._lock:
            check_indices(slots, self.capacity)
            check_priorities(values)
            done = 0
            for bank, rows, local in self._by_bank(slots):
                try:
                    done += bank.update(local, values[rows], None if versions is None else versions[rows])
                except ReplayError as error:  # which counts in the bank
                    unwritten = rows[np.asarray(bank.state_dict()["generations"])[local] == 0]
                    if not len(unwritten):
                        raise
                    position = unwritten[0]
                    raise ReplayError(
                        f"Index {slots[position]} at position {position} was never inserted: "
                        "only written slots can be updated."
                    ) from error
            return done

    def retrieve(self, indices: ArrayLike) -> np.ndarray:
        """Return exact priorities `(n,)` float32."""
        slots = as_indices(indices)
        check_indices(slots, self.capacity)
        found = np.empty(len(slots), np.float32)
        for bank, rows, local in self._by_bank(slots):
            found[rows] = bank.retrieve(local)
        return found

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent and requantise every slot."""
        with self._lock:
            for bank in self._banks:
                bank.set_alpha(alpha)

    def statistics(self) -> ReplayStatistics:
        """Sums over the banks.

        Ages are those in their banks, times L. The effective sample size is the sum of those of the banks, without the
        correction for banks.
        """
        with self._lock:
            found = [bank.statistics() for bank in self._banks]
            scale, total = self.scale, self.total
        filled = sum(one.filled for one in found)
        sums = {name: sum(getattr(one, name) for one in found) for name in COUNTERS}
        histogram = tuple(map(sum, zip(*(one.histogram for one in found), strict=True)))
        return ReplayStatistics(
            filled=filled,
            total=total,
            max_priority=max(one.max_priority for one in found),
            scale=scale,
            **sums,
            histogram=histogram,
            samples_per_item=sum(one.samples_per_item * one.filled for one in found) / max(filled, 1),
            age_mean=sum(one.age_mean for one in found),
            age_max=self.banks * max(one.age_max for one in found),
            effective_sample_size=sum(one.effective_sample_size for one in found),
        )

    def state_dict(self) -> ReplayStateDict:
        """The state of all banks, with names such as `bank.0.leaves`, their count and the spread."""
        with self._lock:
            state: ReplayStateDict = {"banks": self.banks, "spread": self._spread}
            for number, bank in enumerate(self._banks):
                state |= {f"bank.{number}.{name}": value for name, value in bank.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Take over a saved state of as many banks; CheckpointError, changing nothing, for another or damage."""
        for name, expected in (("banks", self.banks), ("spread", self._spread)):
            found = state.get(name)
            if isinstance(found, np.ndarray) or found != expected:
                raise CheckpointError(
                    f"The saved replay's {name} must be {expected!r}; found {found!r}. Resume with the same banks."
                )
        parts: list[dict[str, np.ndarray | int | float | str]] = [{} for _ in self._banks]
        for name, value in state.items():
            prefix, _, rest = name.partition(".")
            number, _, key = rest.partition(".")
            if name in ("banks", "spread"):
                continue
            if prefix != "bank" or not number.isdigit() or int(number) >= self.banks:
                raise CheckpointError(f"The saved replay holds {name!r}, which no replay of {self.banks} banks has.")
            parts[int(number)][key] = value
        with self._lock:
            before = [bank.state_dict() for bank in self._banks]
            try:
                for bank, part in zip(self._banks, parts, strict=True):
                    bank.load_state_dict(part)
            except CheckpointError:
                for bank, part in zip(self._banks, before, strict=True):
                    bank.load_state_dict(part)
                raise

    def close(self) -> None:
        """Free the memory. May be repeated."""
        with contextlib.ExitStack() as stack:
            for bank in self._banks:
                stack.callback(bank.close)

    def _by_bank(self, slots: np.ndarray) -> Iterator[tuple[ReplayManager, np.ndarray, np.ndarray]]:
        """Each bank that has one of the slots, their positions, and their slots in the bank."""
        numbers = self.bank_of(slots)
        local = slots // self.banks if self._spread == "round_robin" else slots % self._each
        for number, bank in enumerate(self._banks):
            rows = np.flatnonzero(numbers == number)
            if len(rows):
                yield bank, rows, local[rows]

    def _global(self, number: int, local: np.ndarray) -> np.ndarray:
        return local * self.banks + number if self._spread == "round_robin" else local + number * self._each


def share_of_batch(batch_size: int, banks: int) -> int:
    """Rows that each of `banks` gives to a batch; ReplayError unless that is a whole number of at least 1."""
    if batch_size < banks:
        raise ReplayError(f"A batch of {batch_size} cannot take a row from each of {banks} banks: use fewer banks.")
    if batch_size % banks:
        below = batch_size - batch_size % banks
        raise ReplayError(
            f"A batch of {batch_size} cannot be divided among {banks} banks. Set batch_size to {below} or "
            f"{below + banks}, or the count of banks to a divisor of {batch_size}."
        )
    return batch_size // banks


def bank_capacity(capacity: int, banks: int) -> int:
    """Slots of each of `banks`; ReplayError unless they divide `capacity`."""
    if banks < 1 or capacity % banks:
        raise ReplayError(
            f"A replay of {capacity} slots cannot be divided among {banks} banks. Set its size to "
            f"{capacity - capacity % max(banks, 1)}, or the count of banks to a divisor of {capacity}."
        )
    return capacity // banks
