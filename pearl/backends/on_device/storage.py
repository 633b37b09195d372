"""Data Storage in the memory of a parallel device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pearl.replay.storage import StorageOnDevice, matching_rows
from pearl.spec import TransitionSpec

if TYPE_CHECKING:
    from pearl import _device
    from pearl.backends.on_device import OpenDevice


class DataStorageOnDevice(StorageOnDevice):
    """Ring of `capacity` transitions on the queue of a device. Inserts and gathers in one launch each.

    If `pinned`, the columns lie in the host's memory, where the device reads the rows that are gathered.
    """

    def __init__(self, spec: TransitionSpec, capacity: int, device: OpenDevice, *, pinned: bool = False) -> None:
        super().__init__(spec, capacity)
        self.queue = device.queue
        self._names = tuple(field.name for field in spec.fields)
        columns = [(np.dtype(field.dtype), field.shape) for field in spec.fields]
        self._store: _device.ColumnStore = device.module.ColumnStore(self.queue, capacity, columns, pinned)

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Read-only host copies `(capacity, *shape)`, for checkpoints."""
        copies = {name: self.kernel.read(column, self.capacity) for column, name in enumerate(self._names)}
        for copy in copies.values():
            copy.flags.writeable = False
        return MappingProxyType(copies)

    @property
    def kernel(self) -> _device.ColumnStore:
        """The columns themselves, for kernels on the same queue."""
        self._require_open()
        return self._store

    def gather(self, indices: ArrayLike, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Copy the rows at `indices` `(n,)` out, into the caller's arrays `(n, *shape)` if given.

        Without `out`, the arrays returned are in memory that the host and the device share. Raises ReplayError for a
        slot that is not written yet, or arrays that do not fit.
        """
        store = self.kernel
        slots = self._checked_slots(indices)
        if out is None:
            return dict(zip(self._names, store.gather(slots), strict=True))
        targets = matching_rows(self.spec, out, len(slots), exact=True)
        for target, rows in zip(targets, store.gather(slots), strict=True):
            np.copyto(target, rows)
        return dict(zip(self._names, targets, strict=True))

    def _rows(self, columns: Mapping[str, np.ndarray], count: int) -> list[np.ndarray]:
        return [np.ascontiguousarray(rows) for rows in matching_rows(self.spec, columns, count)]

    def _write(self, start: int, count: int, rows: list[np.ndarray]) -> None:
        self._store.insert(start, count, rows)

    def _free(self) -> None:
        self._store.close()
