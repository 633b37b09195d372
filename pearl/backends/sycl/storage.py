"""Data Storage in the memory of a SYCL device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pearl.backends.sycl.device import sycl_queue
from pearl.backends.sycl.replay import DEFAULT_DEVICE, device_memory
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.errors import ReplayError
from pearl.replay.arguments import as_indices
from pearl.replay.memory import check_fits
from pearl.replay.storage import StorageOnDevice, matching_rows
from pearl.spec import TransitionSpec

if TYPE_CHECKING:
    from pearl import _sycl


class SyclDataStorage(StorageOnDevice):
    """Ring of `capacity` transitions on the SYCL device `device`; the same interface as DataStorage.

    Inserts and gathers in one launch each. Raises CapacityError if the memory that is free does not suffice,
    DeviceError if the device cannot be used or takes less in one piece than a column needs.
    """

    def __init__(self, spec: TransitionSpec, capacity: int, device: str = DEFAULT_DEVICE) -> None:
        super().__init__(spec, capacity)
        self.device = device
        check_fits(capacity, spec.nbytes, device_memory(device))
        self.queue = sycl_queue(device)
        self._names = tuple(field.name for field in spec.fields)
        columns = [(np.dtype(field.dtype), field.shape) for field in spec.fields]
        self._store: _sycl.ColumnStore | None = sycl_runtime().module.ColumnStore(self.queue, capacity, columns)

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Read-only host copies `(capacity, *shape)`, for checkpoints."""
        store = self._open()
        copies = {name: store.read(column, self.capacity) for column, name in enumerate(self._names)}
        for copy in copies.values():
            copy.flags.writeable = False
        return MappingProxyType(copies)

    @property
    def kernel(self) -> _sycl.ColumnStore:
        """The columns themselves, for kernels on the same queue."""
        return self._open()

    def insert(self, columns: Mapping[str, np.ndarray], count: int | None = None) -> np.ndarray:
        """Store the first `count` rows (all, if None) of each array; return their slots."""
        store = self._open()
        if count is None:
            count = len(next(iter(columns.values()), ()))
        indices = self._ring.next_indices(count)
        store.insert(self.cursor, count, self._rows(columns, count))
        self._ring.advance(count)
        return indices

    def gather(self, indices: ArrayLike, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Copy the rows at `indices` `(n,)` out, into the caller's arrays `(n, *shape)` if given.

        Without `out` the arrays lie where the device wrote them, in memory that the host and the device share. Raises
        ReplayError for a slot not yet written, or arrays that do not fit.
        """
        store = self._open()
        slots = as_indices(indices)
        for position in np.flatnonzero((slots < 0) | (slots >= self.size))[:1]:
            raise ReplayError(
                f"Index at position {position} must lie in [0, {self.size}), the rows stored; found {slots[position]}."
            )
        if out is None:
            return dict(zip(self._names, store.gather(slots), strict=True))
        targets = matching_rows(self.spec, out, len(slots), exact=True)
        for target, rows in zip(targets, store.gather(slots), strict=True):
            np.copyto(target, rows)
        return dict(zip(self._names, targets, strict=True))

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Take over saved rows, of which the first `size` count; raises ReplayError if they do not fit."""
        store = self._open()
        rows = self._rows(columns, size)
        self._ring.restore(size=size, cursor=cursor, inserted=inserted)
        store.insert(0, size, rows)

    def close(self) -> None:
        """Free the memory. May be repeated; anything else then raises ReplayError."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> _sycl.ColumnStore:
        if self._store is None:
            raise ReplayError("The Data Storage is closed.")
        return self._store

    def _rows(self, columns: Mapping[str, np.ndarray], count: int) -> list[np.ndarray]:
        return [np.ascontiguousarray(rows) for rows in matching_rows(self.spec, columns, count)]
