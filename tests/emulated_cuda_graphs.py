"""Streams and CUDA graphs on the CPU, in the place of `pearl.backends.cuda.graphs.CudaGraphs`.

While a step is recorded, each call of an ATen operation is kept with its arguments and results, and what it wrote is
taken back: as on a GPU, recording computes nothing. A replay makes the same calls on the same memory. So a Python
number that changes from step to step shows as a wrong result. Of operations that a GPU cannot record, those that wait
for a result raise the same error.

Operations also carry the stream on which they would run. Two that use the same memory, of which one writes, must be
ordered by waits between their streams: else `races` names them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

import pearl.backends.cuda.graphs
from pearl.backends.cuda import torch_steps

T = TypeVar("T")

_WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim")


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those in an argument or a result of an operation; torch's `tree_leaves` takes several times as long."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if not isinstance(tree, tuple | list | dict):
        return []
    return [tensor for part in (tree.values() if isinstance(tree, dict) else tree) for tensor in _tensors(part)]


@functools.cache
def _written_arguments(operation: Any) -> list[tuple[int, str]]:
    arguments = enumerate(operation._schema.arguments)
    return [(number, a.name) for number, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call changes in place."""
    places = _written_arguments(function)
    return _tensors([args[number] if number < len(args) else kwargs.get(name) for number, name in places])


@functools.cache
def _is_view(operation: Any) -> bool:
    aliases = [result.alias_info for result in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    def __init__(self, on_host: set[int]) -> None:
        super().__init__()
        self._on_host = on_host
        self.calls: list[tuple[bool, Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.made: dict[int, torch.Tensor] = {}
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        masks = name == "index" and any(t.dtype == torch.bool for t in _tensors(args[1:]))
        if (masks or name in _WAITS) and not {_memory(t) for t in _tensors(args)} <= self._on_host:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._kept and storage._cdata not in self.made:
                with _disable_current_modes():
                    self._kept[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        there = {_memory(tensor) for tensor in _tensors((args, kwargs))} | self._kept.keys()
        self.made |= {_memory(t): t for t in _tensors(result) if _memory(t) not in there}
        copied = tree_map(lambda leaf: leaf, (args, kwargs))
        self.calls.append((torch.is_grad_enabled(), func, *copied, result))
        return result

    def undo(self) -> None:
        for storage, kept in self._kept.values():
            storage.copy_(kept)


class EmulatedGraph:
    """Recorded calls."""

    def __init__(self, graphs: EmulatedGraphs, recorder: _Recorder) -> None:
        self._graphs = graphs
        self._calls = [
            (learns, function, args, kwargs, _tensors(results))
            for learns, function, args, kwargs, results in recorder.calls
            if not (hasattr(function, "_schema") and _is_view(function))  # one without launches kernels of PEARL's
        ]
        self.made = [tensor.detach() for tensor in recorder.made.values() if tensor.is_floating_point()]
        self._used = {_memory(tensor) for _, _, *call in self._calls for tensor in _tensors(call)}

    def replay(self) -> None:
        """Make the calls again, on the same tensors."""
        self._graphs.replays += 1
        self._graphs.order.use("a replay", self._used, self._used)
        with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            self._graphs.forget_computed()
            for learns, function, args, kwargs, results in self._calls:
                with torch.set_grad_enabled(learns):  # some kernels keep more for a backward pass
                    again = function(*args, **kwargs)
                for kept, new in zip(results, _tensors(again), strict=True):
                    if _memory(kept) != _memory(new):
                        kept.copy_(new)


class _Order(TorchDispatchMode):
    """Keeps, for all memory, on which streams it was read and written when."""

    def __init__(self, graphs: EmulatedGraphs) -> None:
        super().__init__()
        self._graphs = graphs
        self._writes: dict[int, tuple[str, int]] = {}
        self._reads: dict[int, dict[str, int]] = defaultdict(dict)
        self._alive: list[Any] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_view(func):
            self._alive.append((args, kwargs, result))
            written = (*_written(func, args, kwargs), *_tensors(result))
            self.use(str(func), set(map(_memory, _tensors((args, kwargs)))), set(map(_memory, written)))
        return result

    def use(self, what: str, used: set[int], written: set[int]) -> None:
        """Note that the current stream uses memory, and writes some."""
        stream, clock = self._graphs.tick()
        for memory in used:
            if memory in self._writes:
                self._check(what, *self._writes[memory], clock)
            self._reads[memory][stream] = clock[stream]
        for memory in written:
            for other, time in self._reads[memory].items():
                self._check(what, other, time, clock)
            self._writes[memory] = stream, clock[stream]

    def _check(self, what: str, other: str, time: int, clock: Counter[str]) -> None:
        if time > clock[other]:
            self._graphs.races.append(f"{what} on {self._graphs.current} does not wait for {other}")


def instead_of_cuda(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedGraphs]:
    """Learners on "cuda" get emulated graphs: these, in the order in which they are made."""
    made: list[EmulatedGraphs] = []

    def make(device: torch.device) -> EmulatedGraphs:
        assert device.type == "cuda"
        made.append(EmulatedGraphs())
        return made[-1]

    monkeypatch.setattr(pearl.backends.cuda.graphs, "CudaGraphs", make)
    torch_steps._warn_once.cache_clear()
    return made


class EmulatedEvent:
    waited = False

    def synchronize(self) -> None:
        self.waited = True


class EmulatedGraphs:
    """In the place of `CudaGraphs`; `replays` counts those of all graphs."""

    def __init__(self, device: object = None) -> None:
        self.device = torch.device("cpu")
        self.current = "main"
        self.captures = self.replays = 0
        self.races: list[str] = []
        self.waits: list[tuple[str, str]] = []
        self._clocks: dict[str, Counter[str]] = defaultdict(Counter)
        self._graphs: list[EmulatedGraph] = []
        self._recorder: _Recorder | None = None
        self.order = _Order(self)
        self.events: list[EmulatedEvent] = []
        self.on_host: set[int] = set()  # the memory of a trainer's tensors that would not be on the device
        self.on_device: set[int] = set()  # the memory of columns that would be

    def tick(self) -> tuple[str, Counter[str]]:
        """The next moment of the current stream: its name, and how much of each stream is over by then."""
        clock = self._clocks[self.current]
        clock[self.current] += 1
        return self.current, clock

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def record(self) -> EmulatedEvent:
        self.events.append(EmulatedEvent())
        return self.events[-1]

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) not in self.on_device

    @contextlib.contextmanager
    def main(self, stream: object = None) -> Iterator[None]:
        self.order = _Order(self)
        with self.order:
            yield

    def _wait(self, waiting: str, other: str) -> None:
        self.waits.append((waiting, other))
        self._clocks[waiting] |= self._clocks[other]

    @contextlib.contextmanager
    def part(self, number: int) -> Iterator[None]:
        name = f"part {number}"
        self._wait(name, "main")
        self.current = name
        try:
            yield
        finally:
            self.current = "main"

    def join(self, parts: int) -> None:
        for number in range(parts):
            self._wait("main", f"part {number}")

    def forget(self) -> None:
        self._graphs.clear()

    def launch(self, queue: object, work: Callable[[], None]) -> None:
        if self._recorder is None:
            work()
        else:
            self._recorder.calls.append((False, work, (), {}, None))

    def capture(self, step: Callable[[], T]) -> tuple[EmulatedGraph, T]:
        self.captures += 1
        self._recorder = recorder = _Recorder(self.on_host)
        try:
            with recorder:
                result = step()
        finally:
            self._recorder = None
            recorder.undo()
        graph = EmulatedGraph(self, recorder)
        self._graphs.append(graph)
        with _disable_current_modes():
            self.forget_computed()
        return graph, result

    def forget_computed(self) -> None:
        """All graphs share the memory of what they compute: another's replay overwrites it."""
        for graph in self._graphs:
            for tensor in graph.made:
                tensor.fill_(math.nan)
