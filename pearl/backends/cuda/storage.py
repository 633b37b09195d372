"""Data Storage in torch tensors, on the device where the Learner is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import ArrayLike

from pearl.errors import ReplayError
from pearl.replay.arguments import as_indices
from pearl.replay.memory import check_fits, free_memory
from pearl.replay.storage import StorageOnDevice, matching_rows
from pearl.spec import TransitionSpec

Rows = Mapping[str, "np.ndarray | torch.Tensor"]


class TorchDataStorage(StorageOnDevice):
    """Ring of `capacity` transitions in tensors on `device`; the same interface as DataStorage.

    `gather` returns tensors on the device. Raises CapacityError if the device's free memory does not suffice.
    """

    def __init__(self, spec: TransitionSpec, capacity: int, device: torch.device | str) -> None:
        super().__init__(spec, capacity)
        self.device = torch.device(device)
        check_fits(capacity, spec.nbytes, _device_free(self.device))
        self._closed = False
        self._columns = {
            f.name: torch.zeros((capacity, *f.shape), dtype=torch_dtype(f.dtype), device=self.device)
            for f in spec.fields
        }

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Read-only host copies `(capacity, *shape)`, for checkpoints."""
        copies = {name: column.cpu().numpy().view() for name, column in self._columns.items()}
        for copy in copies.values():
            copy.flags.writeable = False
        return MappingProxyType(copies)

    def insert(self, columns: Rows, count: int | None = None) -> np.ndarray:
        """Store the first `count` rows (all, if None) of each array or tensor; return their slots."""
        self._require_open()
        if count is None:
            count = len(next(iter(columns.values()), ()))
        indices = self._ring.next_indices(count)
        self._write(self.cursor, self._rows(columns, count))
        self._ring.advance(count)
        return indices

    def gather(
        self, indices: ArrayLike | torch.Tensor, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Copy the rows at `indices` `(n,)` out, into the caller's tensors on the device if given.

        Indices from the host are checked, raising ReplayError; a tensor on the device is trusted.
        """
        self._require_open()
        slots = self._slots(indices)
        if out is None:
            return {name: column.index_select(0, slots) for name, column in self._columns.items()}
        for field in self.spec.fields:
            target = out.get(field.name)
            shape = (len(slots), *field.shape)
            if target is None or tuple(target.shape) != shape or target.dtype != torch_dtype(field.dtype):
                found = "none" if target is None else f"{target.dtype} {tuple(target.shape)}"
                raise ReplayError(f"Column {field.name!r} must be {field.dtype} of shape {shape}; found {found}.")
            torch.index_select(self._columns[field.name], 0, slots, out=target)
        return {field.name: out[field.name] for field in self.spec.fields}

    def restore(self, columns: Rows, *, size: int, cursor: int, inserted: int) -> None:
        """Take over saved rows, of which the first `size` count; raises ReplayError if they do not fit."""
        self._require_open()
        rows = self._rows(columns, size)
        self._ring.restore(size=size, cursor=cursor, inserted=inserted)
        self._write(0, rows)

    def close(self) -> None:
        """Free the memory. May be repeated; anything else then raises ReplayError."""
        self._closed = True
        self._columns = {}

    def _require_open(self) -> None:
        if self._closed:
            raise ReplayError("The Data Storage is closed.")

    def _slots(self, indices: ArrayLike | torch.Tensor) -> torch.Tensor:
        if isinstance(indices, torch.Tensor) and indices.device.type != "cpu":
            return indices
        slots = as_indices(indices.numpy() if isinstance(indices, torch.Tensor) else indices)
        for position in np.flatnonzero((slots < 0) | (slots >= self.size))[:1]:
            raise ReplayError(
                f"Index at position {position} must lie in [0, {self.size}), the rows stored; found {slots[position]}."
            )
        return torch.from_numpy(slots).to(self.device)

    def _rows(self, columns: Rows, count: int) -> list[torch.Tensor]:
        """The first `count` rows of each column in storage order, checked, as tensors wherever they were."""
        arrays = {name: rows for name, rows in columns.items() if isinstance(rows, np.ndarray)}
        if len(arrays) == len(columns):
            checked = matching_rows(self.spec, arrays, count)
            return [torch.from_numpy(np.ascontiguousarray(rows)) for rows in checked]
        tensors = {name: torch.as_tensor(rows) for name, rows in columns.items()}
        rows: list[torch.Tensor] = []
        for field in self.spec.fields:
            tensor = tensors.get(field.name)
            fits = (
                tensor is not None
                and tuple(tensor.shape[1:]) == field.shape
                and tensor.dtype == torch_dtype(field.dtype)
                and len(tensor) >= count
            )
            if tensor is None or not fits:
                found = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ReplayError(
                    f"Column {field.name!r} must be {field.dtype} of shape {(count, *field.shape)} or more rows; "
                    f"found {found}."
                )
            rows.append(tensor[:count])
        return rows

    def _write(self, start: int, rows: list[torch.Tensor]) -> None:
        for column, source in zip(self._columns.values(), rows, strict=True):
            before_end = min(len(source), self.capacity - start)
            column[start : start + before_end].copy_(source[:before_end])
            column[: len(source) - before_end].copy_(source[before_end:])


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a NumPy dtype name; raises ReplayError where torch has none."""
    dtype = getattr(torch, np.dtype(name).name, None)
    if not isinstance(dtype, torch.dtype):
        raise ReplayError(f"torch has no dtype {name!r}.")
    return dtype


def _device_free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()
