"""Queues between processes and threads, all in shared memory.

Rings have fixed-size slots whose fields are NumPy views: the producer writes a message into the arrays that the
consumer reads. Each has one producer and one consumer; each publication rings the consumer's doorbell, if it has one,
so that a consumer of many queues waits on a single word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pearl import _native
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.spec import FieldSpec

_ALIGNMENT = 64


class Bell:
    """A doorbell that processes share: a consumer of many queues waits on it."""

    def __init__(self) -> None:
        self._attach(SharedBuffer(_native.Doorbell.nbytes))

    def _attach(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self.native = _native.Doorbell(buffer.memory)

    def value(self) -> int:
        """A count that every ring changes; read it before checking the queues."""
        return self.native.value()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until the count differs from `seen`; False on timeout. Releases the GIL."""
        return self.native.wait(seen, timeout_s)

    def ring(self) -> None:
        """Wake the waiter."""
        self.native.ring()

    def __getstate__(self) -> SharedBuffer:
        return self._buffer

    def __setstate__(self, buffer: SharedBuffer) -> None:
        self._attach(buffer)


class ColumnQueue:
    """Bounded single-producer, single-consumer ring; each slot holds the arrays that `fields` describe.

    Pass it to a spawned process to share it. `with` closes it, which wakes both sides: the producer gets
    QueueClosedError at once, the consumer after it has read all published messages.
    """

    def __init__(self, fields: Sequence[FieldSpec], slots: int, bell: Bell | None = None) -> None:
        self._attach(tuple(fields), slots, bell, None)

    def _attach(
        self, fields: tuple[FieldSpec, ...], slots: int, bell: Bell | None, buffer: SharedBuffer | None
    ) -> None:
        offsets = np.cumsum([0] + [-(-f.nbytes // _ALIGNMENT) * _ALIGNMENT for f in fields])
        slot_bytes = int(offsets[-1])
        create = buffer is None
        self._buffer = buffer or SharedBuffer(_native.SlotQueue.nbytes(slots, slot_bytes))
        self._native = _native.SlotQueue(self._buffer.memory, slots, slot_bytes, create)
        self._fields, self._slots, self._bell = fields, slots, bell
        if bell is not None:
            self._native.attach_bell(bell.native)
        self._views = [self._slot_views(slot, offsets) for slot in range(slots)]

    def _slot_views(self, slot: int, offsets: np.ndarray) -> dict[str, np.ndarray]:
        base = self._native.offset(slot)
        views: dict[str, np.ndarray] = {}
        for spec, offset in zip(self._fields, offsets, strict=False):
            count = int(np.prod(spec.shape, dtype=np.int64))
            flat = np.frombuffer(self._buffer.memory, spec.dtype, count, base + int(offset))
            views[spec.name] = flat.reshape(spec.shape)
        return views

    def __getstate__(self) -> tuple[Any, ...]:
        return self._fields, self._slots, self._bell, self._buffer

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._attach(*state)

    def arrays(self, slot: int) -> dict[str, np.ndarray]:
        """Either side: the arrays of a slot, whichever side has it now."""
        return self._views[slot]

    def reserve(self, timeout_s: float = 0.0) -> dict[str, np.ndarray] | None:
        """Producer: the next free slot's arrays to fill, or None if none is free in time."""
        slot = self._native.reserve(timeout_s)
        return None if slot < 0 else self._views[slot]

    def publish(self, rows: int = 0) -> None:
        """Producer: publish the reserved slot, with the count of rows filled."""
        self._native.publish(rows)

    def peek(self, timeout_s: float = 0.0) -> tuple[dict[str, np.ndarray], int] | None:
        """Consumer: arrays and row count of the oldest message, or None; valid until `release`."""
        slot = self._native.peek(timeout_s)
        return None if slot < 0 else (self._views[slot], self._native.count(slot))

    def release(self) -> None:
        """Consumer: free the slot of the last `peek`."""
        self._native.release()

    def __len__(self) -> int:
        return self._native.size()

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """The arrays of a message."""
        return self._fields

    @property
    def slots(self) -> int:
        """Messages that the queue can hold."""
        return self._slots

    @property
    def native(self) -> _native.SlotQueue:
        """The ring itself, for a native producer or consumer."""
        return self._native

    def close(self) -> None:
        """Wake both sides for good; safe from either."""
        self._native.close()

    def __enter__(self) -> ColumnQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WeightSyncQueue:
    """WSQ: versioned snapshots of the policy's weights, with one writer and any number of readers of the newest."""

    def __init__(self, weight_count: int) -> None:
        nbytes = 4 * weight_count
        self._attach(weight_count, SharedBuffer(_native.Snapshot.nbytes(nbytes)), create=True)

    def _attach(self, weight_count: int, buffer: SharedBuffer, *, create: bool) -> None:
        self.weight_count, self._buffer = weight_count, buffer
        self._native = _native.Snapshot(buffer.memory, 4 * weight_count, create)
        self.staging = np.zeros(weight_count, np.float32)
        self.version = 0

    def __getstate__(self) -> tuple[int, SharedBuffer]:
        return self.weight_count, self._buffer

    def __setstate__(self, state: tuple[int, SharedBuffer]) -> None:
        self._attach(*state, create=False)

    @property
    def native(self) -> _native.Snapshot:
        """The snapshot itself, for a native writer."""
        return self._native

    def reader(self) -> WeightSyncQueue:
        """Another reader in this process, which has read nothing yet."""
        other = WeightSyncQueue.__new__(WeightSyncQueue)
        other._attach(self.weight_count, self._buffer, create=False)
        return other

    def write(self, weights: np.ndarray) -> int:
        """Writer: publish `(weight_count,)` float32; returns the new version."""
        return self._native.write(weights)

    def poll(self) -> np.ndarray | None:
        """Reader: the newest weights if they are newer than those of the last call, else None; valid until the next."""
        version = self._native.read(self.staging, self.version)
        if version == self.version:
            return None
        self.version = version
        return self.staging
