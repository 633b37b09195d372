"""Data Storage: the transitions, one column per field, in a ring."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from pearl import _native
from pearl.errors import ReplayError
from pearl.replay.arguments import as_indices
from pearl.replay.memory import check_fits, free_memory
from pearl.spec import FieldSpec, TransitionSpec


class Ring:
    """Where the next rows go: slots are taken in turn, the oldest are overwritten."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ReplayError(f"The capacity of a Data Storage must be at least 1; found {capacity}.")
        self.capacity = capacity
        self.size = self.cursor = self.inserted = 0

    def check_count(self, count: int) -> None:
        """Raise ReplayError unless `count` rows can be inserted at once."""
        if not 0 <= count <= self.capacity:
            raise ReplayError(f"An insertion must have 0 to {self.capacity} rows, the capacity; found {count}.")

    def next_indices(self, count: int) -> np.ndarray:
        """Return the slots `(count,)` int64 that the next insertion takes."""
        self.check_count(count)
        indices = np.arange(self.cursor, self.cursor + count, dtype=np.int64)
        if self.cursor + count > self.capacity:
            indices %= self.capacity
        return indices

    def advance(self, count: int) -> None:
        """Take the next `count` slots."""
        self.cursor = (self.cursor + count) % self.capacity
        self.size = min(self.size + count, self.capacity)
        self.inserted += count

    def restore(self, *, size: int, cursor: int, inserted: int) -> None:
        """Go back to a saved place; raises ReplayError unless the numbers fit together."""
        full = size == self.capacity
        if not (0 <= size <= self.capacity and inserted >= size and 0 <= cursor < self.capacity) or (
            not full and cursor != size
        ):
            raise ReplayError(
                f"A Data Storage of {self.capacity} slots cannot have size={size}, cursor={cursor}, "
                f"inserted={inserted}."
            )
        self.size, self.cursor, self.inserted = size, cursor, inserted


class DataStorage:
    """Ring of `capacity` transitions in NumPy columns; the memory is committed as it is written to.

    One thread inserts. Another may gather at the same time, from slots other than those being inserted. Raises
    CapacityError if the memory that is free does not suffice.
    """

    def __init__(self, spec: TransitionSpec, capacity: int) -> None:
        self._ring = Ring(capacity)
        check_fits(capacity, spec.nbytes, free_memory())
        self.spec = spec
        self._names = tuple(f.name for f in spec.fields)
        self._columns = {f.name: np.zeros((capacity, *f.shape), f.dtype) for f in spec.fields}
        self._native: _native.ColumnStore | None = _native.ColumnStore(list(self._columns.values()))

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._ring.capacity

    @property
    def size(self) -> int:
        """Slots that hold a transition."""
        return self._ring.size

    @property
    def cursor(self) -> int:
        """The slot that the next transition takes."""
        return self._ring.cursor

    @property
    def inserted(self) -> int:
        """Transitions inserted since creation."""
        return self._ring.inserted

    @property
    def nbytes(self) -> int:
        """Bytes of all columns when full."""
        return self.capacity * self.spec.nbytes

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Read-only views `(capacity, *shape)`; rows from `size` on are not written yet."""
        views = {name: column.view() for name, column in self._columns.items()}
        for view in views.values():
            view.flags.writeable = False
        return MappingProxyType(views)

    def next_indices(self, count: int) -> np.ndarray:
        """Return the slots `(count,)` int64 that the next insertion takes."""
        return self._ring.next_indices(count)

    def insert(self, columns: Mapping[str, np.ndarray], count: int | None = None) -> np.ndarray:
        """Store the first `count` rows (all, if None) of each column `(rows, *shape)`; return their slots.

        Raises ReplayError for a column that is missing, unknown, or of another shape or dtype, and for more rows
        than the capacity.
        """
        store = self._open()
        if count is None:
            count = len(next(iter(columns.values()), ()))
        indices = self._ring.next_indices(count)
        sources = [np.ascontiguousarray(rows) for rows in matching_rows(self.spec, columns, count)]
        store.insert(self.cursor, count, sources)
        self._ring.advance(count)
        return indices

    def gather(self, indices: ArrayLike, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Copy the rows at `indices` `(n,)` out, into the caller's arrays `(n, *shape)` if given.

        Raises ReplayError for a slot not yet written, or arrays that do not fit.
        """
        store = self._open()
        slots = as_indices(indices)
        if out is None:
            targets = self.spec.empty(len(slots))
        else:
            rows = matching_rows(self.spec, out, len(slots), exact=True)
            targets = dict(zip(self._names, rows, strict=True))
        store.gather(slots, self.size, list(targets.values()))
        return targets

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Take over saved rows, of which the first `size` count; raises ReplayError if they do not fit."""
        store = self._open()
        sources = [np.ascontiguousarray(rows) for rows in matching_rows(self.spec, columns, size)]
        self._ring.restore(size=size, cursor=cursor, inserted=inserted)
        store.insert(0, size, sources)

    def close(self) -> None:
        """Free the memory. May be repeated; anything else then raises ReplayError."""
        self._native = None
        self._columns = {}

    def _open(self) -> _native.ColumnStore:
        if self._native is None:
            raise ReplayError("The Data Storage is closed.")
        return self._native


def matching_rows(
    spec: TransitionSpec, columns: Mapping[str, np.ndarray], count: int, *, exact: bool = False
) -> list[np.ndarray]:
    """Return the first `count` rows of each column in storage order; raises ReplayError for one that does not fit.

    With `exact`, columns must have `count` rows, be contiguous and writeable: they are going to be filled.
    """
    if len(columns) != len(spec.fields):
        unknown = sorted(set(columns) - {f.name for f in spec.fields})
        if unknown:
            raise ReplayError(f"Transitions have no column {unknown[0]!r}; they have {[f.name for f in spec.fields]}.")
    return [_matching(field, columns.get(field.name), count, exact) for field in spec.fields]


def _matching(field: FieldSpec, array: np.ndarray | None, count: int, exact: bool) -> np.ndarray:
    if array is None:
        raise ReplayError(f"Column {field.name!r} is missing.")
    rows = len(array) if array.ndim else -1
    if array.shape[1:] != field.shape or array.dtype != field.dtype or rows < count or (exact and rows != count):
        more = "" if exact else " or more"
        raise ReplayError(
            f"Column {field.name!r} must be {field.dtype} of shape {(count, *field.shape)}{more} rows; "
            f"found {array.dtype} {array.shape}."
        )
    if exact and not (array.flags.c_contiguous and array.flags.writeable):
        raise ReplayError(f"Column {field.name!r} to gather into must be contiguous and writeable.")
    return array if rows == count else array[:count]
