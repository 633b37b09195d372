"""Batches in fixed memory of a GPU, where recorded steps find them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pearl.backends.cuda.graphs import CudaGraphs
from pearl.backends.torch_support import Event
from pearl.lazy_torch import torch

_ALIGNMENT = 256  # bytes, as torch's own allocations


class Staging:
    """Memory on the device for tensors like `sources`, to which those on the host come in one copy."""

    def __init__(self, graphs: CudaGraphs, sources: Sequence[torch.Tensor]) -> None:
        on_host = [number for number, source in enumerate(sources) if graphs.is_on_host(source)]
        places: dict[int, int] = {}
        size = pinned = 0
        for number in sorted(range(len(sources)), key=lambda n: n not in on_host):  # those from the host come first
            places[number] = size
            size += math.ceil(sources[number].nbytes / _ALIGNMENT) * _ALIGNMENT
            pinned = size if number in on_host else pinned
        self._graphs = graphs
        self._pinned = graphs.pinned(pinned)
        self._copied: Event | None = None
        self._memory = torch.empty(size, dtype=torch.uint8, device=graphs.device)
        self._pinned_views = {number: _view(self._pinned, places[number], sources[number]) for number in on_host}
        self._tensors = tuple(_view(self._memory, places[n], source) for n, source in enumerate(sources))

    def fill(self, sources: Sequence[torch.Tensor], *, recorded: bool) -> tuple[torch.Tensor, ...]:
        """`sources` on the device, copied on the current stream.

        Those that are there already are copied for `recorded` steps only, which need them in this memory.
        """
        if self._copied is not None:
            self._copied.synchronize()
        for number, pinned in self._pinned_views.items():
            pinned.copy_(sources[number])
        if self._pinned_views:
            self._memory[: len(self._pinned)].copy_(self._pinned, non_blocking=True)
            self._copied = self._graphs.record()
        there = [number for number in range(len(sources)) if number not in self._pinned_views]
        if not there:
            return self._tensors
        if not recorded:
            return tuple(sources[n] if n in there else tensor for n, tensor in enumerate(self._tensors))
        torch._foreach_copy_([self._tensors[n] for n in there], [sources[n] for n in there], non_blocking=True)
        return self._tensors


def _view(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
