"""The Replay Manager in NumPy: the truth that every backend is tested against, bit for bit."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pearl.errors import ReplayError
from pearl.replay.arguments import (
    LEAF_MAX,
    STATE_FORMAT,
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
from pearl.spec import ReplayMode

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


def stratified(seed: int, call: int, count: int) -> Words:
    """Return uint64 `(count,)`, the k-th uniform in the k-th of `count` equal slices of [0, 2**64)."""
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
    random = (words[:, 0] | (words[:, 1] << _32))[:count]
    if count == 1:
        return random
    width = 2**64 // count
    return np.arange(count, dtype=np.uint64) * np.uint64(width) + mulhi64(random, width)


class ReferenceReplayManager:
    """ReplayManager in NumPy, written to be read: prefix sums over all leaves stand for the tree."""

    def __init__(
        self, capacity: int, *, fanout: int = 16, mode: ReplayMode = "prioritized", alpha: float = 0.6, seed: int = 0
    ) -> None:
        if not 1 <= capacity <= 2**36:
            raise ReplayError(f"Replay capacity must lie in [1, 2**36]; found {capacity}.")
        if mode == "prioritized" and (not 2 <= fanout <= 256 or fanout & (fanout - 1)):
            raise ReplayError(f"Fanout must be a power of two from 2 to 256; found {fanout}.")
        check_exponent("alpha", alpha)
        self._capacity, self._fanout, self._mode = capacity, fanout, mode
        self._lock = threading.Lock()
        self._closed = False
        self._alpha, self._seed, self._call, self._scale = float(alpha), operator.index(seed) % 2**64, 0, DEFAULT_SCALE
        self._max_priority = np.float32(1.0)
        self._counters = dict.fromkeys(("inserts", "updates", "samples", "stale", "saturated", "rescales"), 0)
        rows = capacity if mode == "prioritized" else 0
        self._priorities = np.zeros(rows, np.float32)
        self._leaves = np.zeros(rows, np.uint32)
        self._generations = np.zeros(capacity, np.uint32)

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._capacity

    @property
    def fanout(self) -> int:
        """Children per node; kept, not used: prefix sums do not depend on it."""
        return self._fanout

    @property
    def mode(self) -> ReplayMode:
        """Either "prioritized" or "uniform"."""
        return self._mode

    @property
    def filled(self) -> int:
        """Slots written so far."""
        with self._lock:
            self._require_open()
            return int(np.count_nonzero(self._generations))

    @property
    def total(self) -> int:
        """Sum of the quantised priorities (uniform mode: `filled`)."""
        with self._lock:
            self._require_open()
            return self._total()

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        with self._lock:
            self._require_open()
            return self._alpha

    @property
    def max_priority(self) -> float:
        """Running maximum of the finite priorities given, at least 1."""
        with self._lock:
            self._require_open()
            return float(self._max_priority)

    def insert(self, indices: ArrayLike, priorities: ArrayLike | None = None) -> None:
        """Put new items `(n,)` into slots; see ReplayManager."""
        slots = as_indices(indices)
        values = None if priorities is None else as_priorities(priorities, len(slots))
        with self._lock:
            self._require_open()
            check_indices(slots, self._capacity)
            if values is not None:
                check_priorities(values)
            self._counters["inserts"] += len(slots)
            if self._mode == "prioritized" and len(slots):
                if values is None:
                    self._fit_scale(float(self._max_priority))
                    values = np.full(len(slots), self._max_priority)
                else:
                    self._admit(values)
                self._assign(slots, values)
            for slot in slots:  # each occurrence counts
                self._generations[slot] = max((int(self._generations[slot]) + 1) % 2**32, 1)

    def sample(self, batch_size: int, beta: float = 0.4, out: Sample | None = None) -> Sample:
        """Draw `batch_size` slots by priority; see ReplayManager."""
        batch_size = operator.index(batch_size)
        if batch_size < 1:
            raise ReplayError(f"batch_size must be at least 1; found {batch_size}.")
        check_exponent("beta", beta)
        if out is not None:
            check_out(out, batch_size)
        with self._lock:
            self._require_open()
            written = np.flatnonzero(self._generations)
            if len(written) == 0:
                raise ReplayError("The replay is empty: insert before sampling.")
            x = stratified(self._seed, self._call, batch_size)
            total = self._total() if self._mode == "prioritized" else 0
            if total == 0:
                indices = written[mulhi64(x, len(written)).astype(np.int64)]
                weights = np.ones(batch_size, np.float32)
            else:
                inclusive = np.cumsum(self._leaves, dtype=np.uint64)
                indices = np.searchsorted(inclusive, mulhi64(x, total), side="right")
                weights = importance_weights(self._leaves[indices], beta)
            self._call += 1
            self._counters["samples"] += batch_size
            drawn = Sample(indices.astype(np.int64), weights, self._generations[indices])
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
        with self._lock:
            self._require_open()
            if self._mode == "prioritized":
                check_indices(slots, self._capacity)
                check_priorities(values)
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
            return len(slots)

    def retrieve(self, indices: ArrayLike) -> np.ndarray:
        """Return exact priorities `(n,)` float32."""
        slots = as_indices(indices)
        with self._lock:
            self._require_open()
            check_indices(slots, self._capacity)
            written = self._generations[slots] > 0
            raw = self._priorities[slots] if self._mode == "prioritized" else np.ones(len(slots), np.float32)
            return np.where(written, raw, np.float32(0))

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent and requantise every slot."""
        check_exponent("alpha", alpha)
        with self._lock:
            self._require_open()
            self._alpha = float(alpha)
            if self._mode == "uniform":
                return
            finite = self._priorities[np.isfinite(self._priorities)]
            largest = float(finite.max(initial=0.0))
            excess = excess_bits(largest, self._alpha, DEFAULT_SCALE) if largest > 0 else 0
            self._scale = DEFAULT_SCALE - excess
            self._counters["rescales"] += excess > 0
            self._leaves = quantise(self._priorities, self._alpha, self._scale)

    def statistics(self) -> ReplayStatistics:
        """Counts so far."""
        with self._lock:
            self._require_open()
            return ReplayStatistics(
                filled=int(np.count_nonzero(self._generations)),
                total=self._total(),
                max_priority=float(self._max_priority),
                scale=self._scale,
                **self._counters,
            )

    def state_dict(self) -> ReplayStateDict:
        """Everything `load_state_dict` needs; arrays are copies."""
        with self._lock:
            self._require_open()
            return {
                "format": STATE_FORMAT,
                "mode": self._mode,
                "capacity": self._capacity,
                "fanout": self._fanout,
                "alpha": self._alpha,
                "seed": self._seed,
                "call": self._call,
                "scale": self._scale,
                "max_priority": float(self._max_priority),
                **self._counters,
                "priorities": self._priorities.copy(),
                "generations": self._generations.copy(),
                "leaves": self._leaves.copy(),
            }

    def load_state_dict(self, state: Mapping[str, np.ndarray | int | float | str]) -> None:
        """Take over a saved state; see ReplayManager."""
        saved = checked_state(state, capacity=self._capacity, mode=self._mode)
        leaves, generations = cast(np.ndarray, saved["leaves"]), cast(np.ndarray, saved["generations"])
        priorities = cast(np.ndarray, saved["priorities"])
        with self._lock:
            self._require_open()
            self._alpha, self._seed = cast(float, saved["alpha"]), cast(int, saved["seed"])
            self._call, self._scale = cast(int, saved["call"]), cast(int, saved["scale"])
            self._max_priority = np.float32(cast(float, saved["max_priority"]))
            self._counters = {name: cast(int, saved[name]) for name in self._counters}
            self._priorities, self._generations = priorities.copy(), generations.copy()
            self._leaves = leaves.copy()

    def close(self) -> None:
        """Free the memory. May be repeated."""
        with self._lock:
            self._closed = True
            self._priorities = np.empty(0, np.float32)
            self._leaves = self._generations = np.empty(0, np.uint32)

    def _require_open(self) -> None:
        if self._closed:
            raise ReplayError("The Replay Manager is closed.")

    def _total(self) -> int:
        if self._mode == "uniform":
            return int(np.count_nonzero(self._generations))
        return int(self._leaves.sum(dtype=np.uint64))

    def _admit(self, values: np.ndarray) -> None:
        finite = values[np.isfinite(values)]
        largest = finite.max(initial=np.float32(0))
        self._counters["saturated"] += len(values) - len(finite)
        self._max_priority = max(self._max_priority, largest)
        self._fit_scale(float(largest))

    def _fit_scale(self, largest: float) -> None:
        excess = excess_bits(largest, self._alpha, self._scale) if largest > 0 else 0
        if excess > 0:
            shifted = self._leaves >> np.uint32(min(excess, 31))
            self._leaves = np.where(self._leaves > 0, np.maximum(shifted, np.uint32(1)), np.uint32(0))
            self._scale -= excess
            self._counters["rescales"] += 1

    def _assign(self, slots: np.ndarray, values: np.ndarray) -> None:
        last_first, first = np.unique(slots[::-1], return_index=True)  # of duplicates the last wins
        self._priorities[last_first] = values[::-1][first]
        self._leaves[last_first] = quantise(values[::-1][first], self._alpha, self._scale)
