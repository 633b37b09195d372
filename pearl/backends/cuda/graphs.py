"""Streams, pinned memory and graphs of a GPU: everything that the torch Learner's steps use of `torch.cuda`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

from pearl.backends.torch_support import Event, Graph
from pearl.garbage import no_collection
from pearl.lazy_torch import torch

if TYPE_CHECKING:
    from pearl import _cuda
    from pearl._device import DeviceQueue

T = TypeVar("T")


@contextlib.contextmanager
def in_order_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on `stream`: after the work so far of the caller's stream, and before its later work."""
    caller = torch.cuda.current_stream(stream.device)
    if caller == stream:
        yield
        return
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        caller.wait_stream(stream)


class CudaGraphs:
    """The streams of a Learner on `device`: a main one, and one for each part of a batch that is trained in parts."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._own = self._main = self._stream()
        self._capturing = False
        self._parts: list[torch.cuda.Stream] = []
        self._pool = torch.cuda.graph_pool_handle()

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of the host, `(size,)` bytes, from which copies to the device do not block."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor must be copied to the device."""
        return tensor.device.type == "cpu"

    def record(self) -> Event:
        """An event that completes when the current stream has done its work so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextlib.contextmanager
    def main(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Run on the main stream: after the work so far of the caller's stream, and before its later work.

        Meanwhile, `stream` is the main stream, if given.
        """
        self._main = stream or self._own
        with in_order_on(self._main):
            yield

    def launch(self, queue: DeviceQueue, work: Callable[[], None]) -> None:
        """Call `work`, which launches kernels of `queue`: on its stream, or on that of `capture` while it records."""
        if self._capturing:
            cast("_cuda.Queue", queue).record_on(self._own.cuda_stream, work)
        else:
            work()

    @contextlib.contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Run on the stream of part `number`, after the work so far of the main stream."""
        while len(self._parts) <= number:
            self._parts.append(self._stream())
        self._parts[number].wait_stream(self._main)
        with torch.cuda.stream(self._parts[number]):
            yield

    def join(self, parts: int) -> None:
        """Let the main stream wait for the streams of the first `parts` parts."""
        for stream in self._parts[:parts]:
            self._main.wait_stream(stream)

    def forget(self) -> None:
        """Use new memory for the next graphs: all have been dropped, and torch refuses memory that no graph uses."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], T]) -> tuple[Graph, T]:
        """Record the operations of `step` on a separate stream, without running them; also returns its result.

        Tensors that `step` makes are in memory that graphs share: their values last until the next replay of any graph.
        Raises the errors of `step`, also for operations that cannot be recorded.
        """
        caller, main = torch.cuda.current_stream(self.device), self._main
        self._main, self._capturing = self._own, True
        try:
            with no_collection():  # which may destroy a graph or free memory: both fail a recording of this thread
                return self._recorded(step)
        finally:
            self._main, self._capturing = main, False
            torch.cuda.set_stream(caller)  # a failed capture leaves its own stream current

    def _recorded(self, step: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index]
        random_state = generator.clone_state()
        error: Exception | None = None
        try:
            # Other threads may allocate memory meanwhile: "thread_local".
            with torch.cuda.graph(graph, pool=self._pool, stream=self._own, capture_error_mode="thread_local"):
                try:
                    result = step()
                except Exception as found:
                    error = found
                    raise
        except Exception as invalidated:
            # A failed capture leaves the generator marked as capturing: it would refuse to draw.
            generator.graphsafe_set_state(random_state)
            raise error or invalidated from None
        return graph, result
