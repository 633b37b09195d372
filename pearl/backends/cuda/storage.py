"""Data Storage on CUDA devices: by PEARL's kernels, and in torch tensors on any device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from pearl.backends.cuda.device import EMULATOR, cuda_availability, cuda_name
from pearl.backends.cuda.runtime import open_cuda
from pearl.backends.on_device.storage import DataStorageOnDevice
from pearl.byte_size import readable_size
from pearl.errors import ConfigurationError, DeviceError, ReplayError
from pearl.lazy_torch import torch
from pearl.replay.memory import check_fits, free_memory
from pearl.replay.storage import Ring, StorageOnDevice, matching_rows
from pearl.spec import FieldSpec, TransitionSpec

logger = logging.getLogger("pearl.cuda")

_SHARE = 0.9  # of the device's free memory that a Data Storage may take: the Learner needs some, too

Rows = Mapping[str, "np.ndarray | torch.Tensor"]


class CudaDataStorage(DataStorageOnDevice):
    """Ring of `capacity` transitions on the CUDA device `device`; the same interface as DataStorage.

    `memory` is "device", or "pinned": memory of the host, where the GPU reads the rows that are gathered (zero copy).
    "auto" takes the device's if it suffices. `gather` returns tensors on the device, which no later call changes.
    Raises CapacityError if the memory that is free does not suffice, DeviceError if the device cannot be used.
    """

    def __init__(
        self,
        spec: TransitionSpec,
        capacity: int,
        device: str = "cuda:0",
        *,
        memory: Literal["auto", "device", "pinned"] = "auto",
    ) -> None:
        if memory not in ("auto", "device", "pinned"):
            raise ConfigurationError(f'memory must be "auto", "device" or "pinned"; found {memory!r}.')
        self.device = cuda_name(device)
        self._place = torch.device("cpu" if self.device == EMULATOR else self.device)
        capacity = Ring(capacity).capacity
        needed, free = capacity * spec.nbytes, _device_free(self._place)
        self.memory = memory if memory != "auto" else "device" if needed <= free * _SHARE else "pinned"
        if memory == "auto" and self.memory == "pinned":
            logger.warning(
                "The Data Storage, %s, is kept in the host's memory, where %s reads it: %s are free on the device.",
                *(readable_size(needed), self.device, readable_size(free)),
            )
        check_fits(capacity, spec.nbytes, free if self.memory == "device" else None)
        super().__init__(spec, capacity, open_cuda(self.device), pinned=self.memory == "pinned")

    def gather(self, indices: ArrayLike, out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Copy the rows at `indices` `(n,)` out, into the caller's tensors or arrays `(n, *shape)` if given.

        Raises ReplayError for a slot that is not written yet, or targets that do not fit.
        """
        into_arrays = out is not None and not any(isinstance(column, torch.Tensor) for column in out.values())
        if into_arrays or self._place.type == "cpu":
            return super().gather(indices, out)
        slots = self._checked_slots(indices)
        # Torch may still read the memory of a batch that was dropped.
        torch.cuda.synchronize(self._place)
        there = self.kernel.gather_there(slots)
        columns = {name: torch.as_tensor(c, device=self._place) for name, c in zip(self._names, there, strict=True)}
        if out is None:
            return columns
        for field in self.spec.fields:
            target, shape = out.get(field.name), (len(slots), *field.shape)
            if not isinstance(target, torch.Tensor) or not _fits(field, target, shape):
                raise _misfit(field, target, shape)
            target.copy_(columns[field.name])
        return dict(out)


class TorchDataStorage(StorageOnDevice):
    """Ring of `capacity` transitions in tensors on `device`, for programs that earlier versions generated.

    It has the interface of DataStorage. `gather` returns tensors on the device. Raises CapacityError if the device's
    free memory does not suffice, DeviceError if it cannot be used.
    """

    def __init__(self, spec: TransitionSpec, capacity: int, device: torch.device | str) -> None:
        super().__init__(spec, capacity)
        self.device = torch.device(device)
        check_fits(capacity, spec.nbytes, _device_free(self.device))
        self._columns = {
            f.name: torch.zeros((capacity, *f.shape), dtype=torch_dtype(f.dtype), device=self.device)
            for f in spec.fields
        }

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Read-only host copies `(capacity, *shape)`, for checkpoints."""
        copies = {name: column.to("cpu", copy=True).numpy() for name, column in self._columns.items()}
        for copy in copies.values():
            copy.flags.writeable = False
        return MappingProxyType(copies)

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
            if target is None or not _fits(field, target, shape):
                raise _misfit(field, target, shape)
            torch.index_select(self._columns[field.name], 0, slots, out=target)
        return {field.name: out[field.name] for field in self.spec.fields}

    def _slots(self, indices: ArrayLike | torch.Tensor) -> torch.Tensor:
        if isinstance(indices, torch.Tensor):
            if indices.device.type != "cpu":
                return indices
            indices = indices.numpy()
        return torch.from_numpy(self._checked_slots(indices)).to(self.device)

    def _rows(self, columns: Rows, count: int) -> list[torch.Tensor]:
        arrays = {name: rows for name, rows in columns.items() if isinstance(rows, np.ndarray)}
        if len(arrays) == len(columns):
            checked = matching_rows(self.spec, arrays, count)
            return [torch.from_numpy(np.ascontiguousarray(rows)) for rows in checked]
        tensors = {name: torch.as_tensor(rows) for name, rows in columns.items()}
        rows: list[torch.Tensor] = []
        for field in self.spec.fields:
            tensor = tensors.get(field.name)
            size = len(tensor) if tensor is not None and tensor.ndim else -1
            if tensor is None or size < count or not _fits(field, tensor, (size, *field.shape)):
                raise _misfit(field, tensor, f"{(count, *field.shape)} or more rows")
            rows.append(tensor[:count])
        return rows

    def _write(self, start: int, count: int, rows: list[torch.Tensor]) -> None:
        before_end = min(count, self.capacity - start)
        for column, source in zip(self._columns.values(), rows, strict=True):
            column[start : start + before_end].copy_(source[:before_end])
            column[: count - before_end].copy_(source[before_end:])

    def _free(self) -> None:
        self._columns = {}


def _fits(field: FieldSpec, tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(tensor.shape) == shape and tensor.dtype == torch_dtype(field.dtype)


def _misfit(field: FieldSpec, tensor: torch.Tensor | None, wanted: object) -> ReplayError:
    found = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
    return ReplayError(f"Column {field.name!r} must be {field.dtype} of shape {wanted}; found {found}.")


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a NumPy dtype name; raises ReplayError where torch has none."""
    dtype = getattr(torch, np.dtype(name).name, None)
    if not isinstance(dtype, torch.dtype):
        raise ReplayError(f"torch has no dtype {name!r}.")
    return dtype


def _device_free(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory()
    if not (available := cuda_availability(device.index or 0)).ok:
        raise DeviceError(
            f"A Data Storage on {device} cannot be made: {available.reason}. `pearl devices` lists the usable devices."
        )
    return int(torch.cuda.mem_get_info(device)[0])
