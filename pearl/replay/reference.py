"""The Replay Manager in NumPy: the reference that every backend must match bit for bit."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pearl.errors import ReplayError
from pearl.replay.arguments import (
    COUNTERS,
    LEAF_LARGE,
    LEAF_MAX,
    PRIORITY_MODES,
    STATE_FORMAT,
    TIME_MODES,
    TIMES_MAX,
    Selection,
    SelectionOptions,
    as_generations,
    as_indices,
    as_priorities,
    check_exponent,
    check_indices,
    check_out,
    check_priorities,
    checked_state,
)
from pearl.replay.protocol import ReplayStateDict, ReplayStatistics, Sample
from pearl.replay.systematic_sampling import sample_systematically

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_SCALE = 20
_LOG2_COEFFICIENTS = (
    49570623885, -24785258860, 16521745522, -12368671917, 9747207777,
    -7569269272, 5226540119, -2794475170, 968735272, -157439128,
)  # fmt: skip
_EXP2_COEFFICIENTS = (1488522215, 515883993, 119176803, 20727931, 2725622, 447061)
_MASK32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Q32 = NDArray[np.int64]
Words = NDArray[np.uint64]


def _log2_q32(fraction: Q32, exponent: Q32) -> Q32:
    acc = np.full_like(fraction, _LOG2_COEFFICIENTS[-1])
    for coefficient in _LOG2_COEFFICIENTS[-2::-1]:
        acc = coefficient + ((acc * fraction) >> 27)
    return exponent * 2**32 + (((acc * fraction) >> 27) >> 3)


def log2_of_float(values: np.ndarray) -> Q32:
    """Return log2 of positive finite float32 `(n,)` as int64 with 32 fraction bits."""
    mantissa, exponent = np.frexp(values.astype(np.float64))  # exact, subnormals of float32 included
    fraction = ((mantissa * 2.0 - 1.0) * 2.0**27).astype(np.int64)
    return _log2_q32(fraction, exponent.astype(np.int64) - 1)


def log2_of_leaf(leaves: np.ndarray) -> Q32:
    """Return log2 of leaves in [1, 2**28) as int64 with 32 fraction bits."""
    return log2_of_float(leaves.astype(np.float64))


def _exp2_q31(fraction: Q32) -> Words:
    x = fraction.astype(np.uint64)
    acc = np.full_like(x, _EXP2_COEFFICIENTS[-1])
    for coefficient in _EXP2_COEFFICIENTS[-2::-1]:
        acc = np.uint64(coefficient) + ((acc * x) >> _32)
    return np.uint64(2**31) + ((acc * x) >> _32)


def _exponent_q28(exponent: float) -> int:
    return math.floor(exponent * 2**28 + 0.5)


def _power_q32(log2: Q32, exponent_q28: int) -> Q32:
    return ((log2 >> 8) * exponent_q28) >> 20


def _round_scaled(y: Q32, scale: int) -> Words:
    shift = 31 - (y >> 32) - scale
    bounded = np.clip(shift, 3, 33).astype(np.uint64)
    one = np.uint64(1)
    rounded = (_exp2_q31(y & 0xFFFFFFFF) + (one << (bounded - one))) >> bounded
    rounded = np.where(shift <= 2, np.uint64(LEAF_MAX + 1), np.where(shift > 33, np.uint64(0), rounded))
    return np.minimum(rounded, np.uint64(LEAF_MAX + 1))


def quantise(priorities: NDArray[np.float32], alpha: float, scale: int) -> NDArray[np.uint32]:
    """Return leaves `(n,)` uint32 for valid float32 priorities: `clip(round(p**alpha * 2**scale), 1, LEAF_MAX)`."""
    positive = (priorities > 0) & np.isfinite(priorities)
    y = _power_q32(log2_of_float(np.where(positive, priorities, np.float32(1))), _exponent_q28(alpha))
    leaves = np.clip(_round_scaled(y, scale), 1, LEAF_MAX)
    return np.where(positive, leaves, np.where(priorities > 0, LEAF_MAX, 0)).astype(np.uint32)


def excess_bits(priority: float, alpha: float, scale: int) -> int:
    """Return the smallest s >= 0 for which a finite positive priority fits at `scale - s`."""
    y = _power_q32(log2_of_float(np.array([priority], np.float32)), _exponent_q28(alpha))
    excess = max(int(y[0] >> 32) + scale - 27, 0)
    return excess + int(_round_scaled(y, scale - excess)[0] > LEAF_MAX)


def importance_weights(leaves: NDArray[np.uint32], beta: float) -> NDArray[np.float32]:
    """Return `(leaf_min / leaf)**beta` `(n,)` float32."""
    log2 = log2_of_leaf(leaves)
    y = _power_q32(log2_of_leaf(leaves.min(keepdims=True)) - log2, _exponent_q28(beta))
    value = _exp2_q31(y & 0xFFFFFFFF).astype(np.float32) * np.float32(2.0**-31)
    weights: NDArray[np.float32] = np.ldexp(value, (y >> 32).astype(np.int32))
    return weights


def philox4x32(counter: Words, seed: int) -> Words:
    """Return Philox4x32-10 words `(n, 4)` for counters `(n, 4)`, both uint64 holding 32-bit words."""
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ np.uint64(key0),
            product1 & _MASK32,
            (product0 >> _32) ^ c3 ^ np.uint64(key1),
            product0 & _MASK32,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def mulhi64(a: Words, b: int) -> Words:
    """Return the high halves of the 128-bit products of uint64 `(n,)` with `b`."""
    a_low, a_high = a & _MASK32, a >> _32
    b_low, b_high = np.uint64(b & 0xFFFFFFFF), np.uint64(b >> 32)
    middle = a_high * b_low + ((a_low * b_low) >> _32)
    other = a_low * b_high + (middle & _MASK32)
    high: Words = a_high * b_high + (middle >> _32) + (other >> _32)
    return high


def independent(seed: int, call: int, count: int) -> Words:
    """Return uint64 `(count,)`, each uniform in [0, 2**64)."""
    pair = np.arange((count + 1) // 2, dtype=np.uint64)
    counter = np.stack(
        [
            pair & _MASK32,
            pair >> _32,
            np.full_like(pair, call & 0xFFFFFFFF),
            np.full_like(pair, call >> 32),
        ],
        axis=1,
    )
    words = philox4x32(counter, seed).reshape(-1, 2)
    return (words[:, 0] | (words[:, 1] << _32))[:count]


def stratified(seed: int, call: int, count: int) -> Words:
    """Return uint64 `(count,)`, the k-th uniform in the k-th of `count` equal slices of [0, 2**64)."""
    random = independent(seed, call, count)
    if count == 1:
        return random
    width = 2**64 // count
    return np.arange(count, dtype=np.uint64) * np.uint64(width) + mulhi64(random, width)


def _mean_priority(priorities: np.ndarray) -> np.float32:
    """Return the mean of the positive finite priorities, in whole units of 2**-40; 1 if there are none."""
    held = priorities[(priorities > 0) & np.isfinite(priorities)].astype(np.float64)
    if len(held) == 0:
        return np.float32(1.0)
    units = sum(min(int(value * 2.0**40), 2**90) for value in held.tolist()) // len(held)
    return np.float32(float(max(units, 1)) * 2.0**-40)


def _effective_sample_size(weights: NDArray[np.float32]) -> float:
    units = (weights * np.float32(2.0**24)).astype(np.uint64)
    sum_, squares = int(units.sum()), int(((units * units) >> np.uint64(16)).sum())
    return float(sum_) * float(sum_) / float(squares) * 2.0**-16


class ReferenceReplayManager:
    """ReplayManager in NumPy, written for readability: prefix sums over all leaves replace the tree."""

    def __init__(self, capacity: int, **options: Unpack[SelectionOptions]) -> None:
        if not 1 <= capacity <= 2**36:
            raise ReplayError(f"Replay capacity must lie in [1, 2**36]; found {capacity}.")
        chosen = Selection(**options)
        mode, fanout = chosen.mode, chosen.fanout
        if mode in PRIORITY_MODES and (not 2 <= fanout <= 256 or fanout & (fanout - 1)):
            raise ReplayError(f"Fanout must be a power of two from 2 to 256; found {fanout}.")
        check_exponent("alpha", chosen.alpha)
        self.capacity, self.fanout, self.mode = capacity, fanout, mode
        self._stratified, self._replacement = bool(chosen.stratified), bool(chosen.replacement)
        self._limit, self._initial_priority = chosen.max_times_sampled, chosen.initial_priority
        self._epsilon = np.float32(chosen.priority_epsilon)
        self._has_priorities = mode in PRIORITY_MODES
        self._lock = threading.Lock()
        self._closed = False
        self._alpha, self._seed, self._call, self._scale = float(chosen.alpha), chosen.seed64, 0, DEFAULT_SCALE
        self._max_priority = np.float32(1.0)
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._looked_at = 0  # count of inserts and updates at the last search for a higher scale
        self._last_ages, self._last_size = np.empty(0, np.uint32), 0.0
        rows = capacity if self._has_priorities else 0
        self._priorities = np.zeros(rows, np.float32)
        self._leaves = np.zeros(rows, np.uint32)
        self._generations = np.zeros(capacity, np.uint32)  # count of inserts up to this one; 0: never written
        self._times = np.zeros(capacity, np.uint16)  # samples since the last write
        self._order: dict[int, None] = {}  # TIME_MODES: slots that may be sampled, oldest first

    @property
    def filled(self) -> int:
        """Slots written so far."""
        with self._open():
            return int(np.count_nonzero(self._generations))

    @property
    def total(self) -> int:
        """Sum of the quantised priorities (modes that keep none: `filled`)."""
        with self._open():
            return self._total()

    @property
    def scale(self) -> int:
        """The power of two of one unit of priority."""
        with self._open():
            return self._scale

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        with self._open():
            return self._alpha

    @property
    def max_priority(self) -> float:
        """Running maximum of the finite priorities given, at least 1."""
        with self._open():
            return float(self._max_priority)

    def insert(self, indices: ArrayLike, priorities: ArrayLike | None = None) -> None:
        """Put new items `(n,)` into slots; see ReplayManager."""
        slots = as_indices(indices)
        values = None if priorities is None else as_priorities(priorities, len(slots))
        with self._open():
            check_indices(slots, self.capacity)
            if values is not None:
                check_priorities(values)
                values = self._raised(values)
            if self._has_priorities and len(slots):
                if values is None:
                    initial = self._initial()
                    self._fit_scale(float(initial))
                    values = np.full(len(slots), initial)
                else:
                    self._admit(values)
            for slot in slots.tolist():  # each occurrence counts
                self._counters["inserts"] += 1
                self._generations[slot] = max(self._counters["inserts"] % 2**32, 1)
                self._times[slot] = 0
                if self.mode in TIME_MODES:
                    self._order.pop(slot, None)
                    self._order[slot] = None
            if self._has_priorities and values is not None:
                self._assign(slots, values)
            if len(slots):
                self._recover_scale()

    def sample(self, batch_size: int, beta: float = 0.4, out: Sample | None = None) -> Sample:
        """Select `batch_size` slots; see ReplayManager."""
        batch_size = operator.index(batch_size)
        if batch_size < 1:
            raise ReplayError(f"batch_size must be at least 1; found {batch_size}.")
        check_exponent("beta", beta)
        if out is not None:
            check_out(out, batch_size)
        with self._open():
            written = int(np.count_nonzero(self._generations))
            if written == 0:
                raise ReplayError("The replay is empty: insert before sampling.")
            masses = self._masses()
            if not masses.any():
                raise ReplayError(
                    f"All {written} items were sampled {self._limit} times: insert before sampling again."
                )
            by_priority = self.mode == "prioritized" and self._total() > 0
            indices, most = self._select(batch_size, masses)
            leaves = self._leaves[indices] if by_priority else np.ones(batch_size, np.uint32)
            weights = importance_weights(np.minimum(leaves, np.uint32(most)), beta)
            drawn = Sample(indices.astype(np.int64), weights, self._generations[indices])
            self._count_samples(drawn)
        if out is None:
            return drawn
        for target, source in zip(out, drawn, strict=True):
            target[...] = source
        return out

    def update(self, indices: ArrayLike, priorities: ArrayLike, generations: ArrayLike | None = None) -> int:
        """Set priorities `(n,)` where not stale and return how many; see ReplayManager."""
        slots = as_indices(indices)
        count = len(slots)
        versions = None if generations is None else as_generations(generations, count)
        values = as_priorities(priorities, count)
        with self._open():
            if self._has_priorities:
                check_indices(slots, self.capacity)
                check_priorities(values)
                values = self._raised(values)
                current = self._generations[slots]
                for position in np.flatnonzero(current == 0)[:1]:
                    raise ReplayError(
                        f"Index {slots[position]} at position {position} was never inserted: "
                        "only written slots can be updated."
                    )
                if versions is not None:
                    kept = versions == current
                    self._counters["stale"] += count - int(kept.sum())
                    slots, values = slots[kept], values[kept]
                self._admit(values)
                self._assign(slots, values)
            self._counters["updates"] += len(slots)
            if count:
                self._recover_scale()
            return len(slots)

    def retrieve(self, indices: ArrayLike) -> np.ndarray:
        """Return exact priorities `(n,)` float32."""
        slots = as_indices(indices)
        with self._open():
            check_indices(slots, self.capacity)
            written = self._generations[slots] > 0
            raw = self._priorities[slots] if self._has_priorities else np.ones(len(slots), np.float32)
            return np.where(written, raw, np.float32(0))

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent and requantise every slot."""
        check_exponent("alpha", alpha)
        with self._open():
            self._alpha = float(alpha)
            if not self._has_priorities:
                return
            self._set_scale(self._highest_scale())
            self._counters["rescales"] += self._scale < DEFAULT_SCALE

    def statistics(self) -> ReplayStatistics:
        """Counts so far."""
        with self._open():
            written = self._generations > 0
            filled = int(np.count_nonzero(written))
            bits = np.frexp(self._leaves[written[: len(self._leaves)]].astype(np.float64))[1]
            ages = self._last_ages
            return ReplayStatistics(
                filled=filled,
                total=self._total(),
                max_priority=float(self._max_priority),
                scale=self._scale,
                **self._counters,
                histogram=tuple(np.bincount(bits, minlength=29).tolist()) if self._has_priorities else (),
                samples_per_item=int(self._times.sum(dtype=np.uint64)) / max(filled, 1),
                age_mean=int(ages.sum(dtype=np.uint64)) / max(len(ages), 1),
                age_max=int(ages.max(initial=np.uint32(0))),
                effective_sample_size=self._last_size,
            )

    def state_dict(self) -> ReplayStateDict:
        """Everything `load_state_dict` needs; arrays are copies."""
        with self._open():
            return {
                "format": STATE_FORMAT,
                "mode": self.mode,
                "capacity": self.capacity,
                "fanout": self.fanout,
                "alpha": self._alpha,
                "seed": self._seed,
                "call": self._call,
                "scale": self._scale,
                "max_priority": float(self._max_priority),
                "max_times_sampled": self._limit,
                **self._counters,
                "looked_at": self._looked_at,
                "priorities": self._priorities.copy(),
                "generations": self._generations.copy(),
                "leaves": self._leaves.copy(),
                "times_sampled": self._times.copy(),
                "order": np.array(list(self._order), np.int64),
            }

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Take over a saved state; see ReplayManager."""
        saved = checked_state(state, capacity=self.capacity, mode=self.mode, max_times_sampled=self._limit)
        arrays = {name: value.copy() for name, value in saved.items() if isinstance(value, np.ndarray)}
        with self._open():
            numbers = cast("dict[str, int]", saved)
            self._alpha, self._seed, self._call = numbers["alpha"], numbers["seed"], numbers["call"]
            self._scale, self._looked_at = numbers["scale"], numbers["looked_at"]
            self._max_priority = np.float32(numbers["max_priority"])
            self._counters = {name: numbers[name] for name in COUNTERS}
            self._priorities, self._generations = arrays["priorities"], arrays["generations"]
            self._leaves, self._times = arrays["leaves"], arrays["times_sampled"]
            self._order = dict.fromkeys(arrays["order"].tolist())
            self._last_ages, self._last_size = np.empty(0, np.uint32), 0.0

    def close(self) -> None:
        """Free the memory. May be repeated."""
        with self._lock:
            self._closed = True
            self._priorities = np.empty(0, np.float32)
            self._leaves = self._generations = np.empty(0, np.uint32)
            self._times = np.empty(0, np.uint16)
            self._order = {}

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of a manager that is not closed."""
        with self._lock:
            if self._closed:
                raise ReplayError("The Replay Manager is closed.")
            yield

    def _total(self) -> int:
        if not self._has_priorities:
            return int(np.count_nonzero(self._generations))
        return int(self._leaves.sum(dtype=np.uint64))

    def _sampleable(self) -> NDArray[np.bool_]:
        return (self._generations > 0) & (self._times < (self._limit or 2**16))

    def _masses(self) -> Words:
        """Return the mass of each slot: its probability is in proportion to it."""
        if self._has_priorities and self._leaves.any():
            return self._leaves.astype(np.uint64)
        return self._sampleable().astype(np.uint64)

    def _initial(self) -> np.float32:
        if self._initial_priority == "max":
            return np.float32(self._max_priority)
        if self._initial_priority == "mean":
            return _mean_priority(self._priorities[self._generations > 0])
        return np.float32(self._initial_priority)

    def _select(self, batch_size: int, masses: Words) -> tuple[np.ndarray, int]:
        """Return the batch's slots, and the largest leaf that counts for a weight."""
        available = int(np.count_nonzero(masses))
        ordered = self.mode not in ("prioritized", "uniform")
        if (ordered or not self._replacement) and batch_size > available:
            raise ReplayError(
                f"A batch of {batch_size} cannot be sampled without repetition: {available} items can be sampled."
            )
        if self.mode in TIME_MODES:
            oldest_first = list(self._order)
            in_order = (oldest_first if self.mode == "fifo" else oldest_first[::-1])[:batch_size]
            return np.array(in_order, np.int64), LEAF_MAX
        if self.mode == "top_k":
            candidates = np.flatnonzero(masses)
            return candidates[np.argsort(-self._priorities[candidates], kind="stable")[:batch_size]], LEAF_MAX
        if self._replacement and not self._limit:
            x = (stratified if self._stratified else independent)(self._seed, self._call, batch_size)
            return np.searchsorted(np.cumsum(masses), mulhi64(x, int(masses.sum())), side="right"), LEAF_MAX
        if self._stratified and (not self._replacement or self._limit == 1):
            if batch_size > available:
                raise self._used_up(batch_size, available)
            indices, most = sample_systematically(
                independent(self._seed, self._call, 2 * batch_size), masses, batch_size
            )
            return indices, min(most, LEAF_MAX)
        return self._draw_in_turn(independent(self._seed, self._call, batch_size), masses), LEAF_MAX

    def _draw_in_turn(self, x: Words, masses: Words) -> np.ndarray:
        """Draw one after the other, each from the mass that the previous draws have left."""
        masses, times = masses.copy(), self._times.astype(np.int64)
        indices = np.empty(len(x), np.int64)
        for k in range(len(x)):
            total = int(masses.sum())
            if total == 0:
                raise self._used_up(len(x), k)
            slot = np.searchsorted(np.cumsum(masses), mulhi64(x[k : k + 1], total)[0], side="right")
            indices[k] = slot
            times[slot] += 1
            if not self._replacement or times[slot] == self._limit:
                masses[slot] = 0
        return indices

    def _used_up(self, batch_size: int, draws: int) -> ReplayError:
        return ReplayError(
            f"A batch of {batch_size} cannot be sampled: {draws} draws are left until every item that can be drawn "
            f"was sampled {self._limit} times."
        )

    def _count_samples(self, drawn: Sample) -> None:
        before = self._sampleable()
        self._call += 1
        self._counters["samples"] += len(drawn.indices)
        self._last_ages = np.uint32(self._counters["inserts"] % 2**32) - drawn.generations
        self._last_size = _effective_sample_size(drawn.weights)
        slots, counts = np.unique(drawn.indices, return_counts=True)
        self._times[slots] = np.minimum(self._times[slots].astype(np.int64) + counts, TIMES_MAX)
        exhausted = np.flatnonzero(before & ~self._sampleable())
        self._counters["exhausted"] += len(exhausted)
        if self._has_priorities:
            self._leaves[exhausted] = 0
        for slot in exhausted.tolist():
            self._order.pop(slot, None)

    def _admit(self, values: np.ndarray) -> None:
        finite = values[np.isfinite(values)]
        largest = finite.max(initial=np.float32(0))
        self._counters["saturated"] += len(values) - len(finite)
        self._max_priority = max(self._max_priority, largest)
        self._fit_scale(float(largest))

    def _raised(self, priorities: NDArray[np.float32]) -> NDArray[np.float32]:
        return priorities + self._epsilon if self._epsilon > 0 else priorities

    def _fit_scale(self, largest: float) -> None:
        excess = excess_bits(largest, self._alpha, self._scale) if largest > 0 else 0
        if excess > 0:
            self._set_scale(self._scale - excess)
            self._counters["rescales"] += 1

    def _recover_scale(self) -> None:
        """Raise the scale again when the priority that lowered it is gone.

        Only if every leaf is below a quarter of the range, and at most once in as many writes as there are slots in
        use: so the cost for each write is constant.
        """
        written = self._counters["inserts"] + self._counters["updates"]
        if self._scale == DEFAULT_SCALE or ((self._leaves >= LEAF_LARGE) & (self._leaves < LEAF_MAX)).any():
            return
        if written - self._looked_at < np.count_nonzero(self._generations):
            return
        self._looked_at = written
        highest = self._highest_scale()
        if highest > self._scale:
            self._set_scale(highest)
            self._counters["recoveries"] += 1

    def _highest_scale(self) -> int:
        """Return the highest scale, up to the default, that fits all finite priorities that may be sampled."""
        held = self._priorities[self._sampleable() & np.isfinite(self._priorities)]
        largest = float(held.max(initial=0.0))
        return DEFAULT_SCALE - (excess_bits(largest, self._alpha, DEFAULT_SCALE) if largest > 0 else 0)

    def _set_scale(self, scale: int) -> None:
        self._scale = scale
        self._leaves = quantise(self._priorities, self._alpha, scale) * self._sampleable()

    def _assign(self, slots: np.ndarray, values: np.ndarray) -> None:
        last_first, first = np.unique(slots[::-1], return_index=True)  # of duplicates the last wins
        self._priorities[last_first] = values[::-1][first]
        leaves = quantise(values[::-1][first], self._alpha, self._scale)
        self._leaves[last_first] = leaves * self._sampleable()[last_first]
