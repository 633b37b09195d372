"""Support that a backend adds to torch on its kind of device: recorded steps and whole iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

    from pearl._device import DeviceQueue
    from pearl.algorithms.batch import Batch
    from pearl.algorithms.trainer import TrainerLike
    from pearl.learner.protocol import FusedIteration

T = TypeVar("T")
Launch: TypeAlias = "Callable[[DeviceQueue, Callable[[], None]], None]"  # calls work that launches the queue's kernels


@dataclass(frozen=True)
class Around:
    """The rest of an iteration: work before and after each of a device's steps, which is recorded with them.

    `before` leaves the batch where the step reads it. `after` gets the step's priorities. Both get a function that
    launches the kernels of a queue in the order of torch's operations. `stream` is the queue's; None: torch's own.
    Recordings belong to one `owner`, which they keep alive: it has the memory that both use.
    """

    before: Callable[[Launch], None]
    after: Callable[[Launch, torch.Tensor], None]
    stream: torch.cuda.Stream | None
    owner: object


Step: TypeAlias = "Callable[[Sequence[torch.Tensor], torch.Tensor, Around], torch.Tensor]"


class Graph(Protocol):
    """Recorded operations."""

    def replay(self) -> None:
        """Run them again, on the same memory, on the current stream."""


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has reached it."""


class Graphs(Protocol):
    """A stream of a device, and recordings made on it."""

    device: torch.device

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of the host, `(size,)` bytes, from which copies to the device do not block."""

    def main(self) -> AbstractContextManager[None]:
        """Run on the stream: after the work so far of the caller's stream, and before its later work."""

    def record(self) -> Event:
        """An event that completes when the current stream has done its work so far."""

    def capture(self, step: Callable[[], T]) -> tuple[Graph, T]:
        """Record the operations of `step` on the stream, without running them; also returns the result of `step`."""


class DeviceSteps(Protocol):
    """Training steps of a torch trainer on a device."""

    @property
    def device(self) -> torch.device:
        """Where it trains."""

    def step(
        self, columns: Sequence[torch.Tensor], weights: torch.Tensor, around: Around | None = None
    ) -> torch.Tensor:
        """What `update_policy` returns for a batch of `columns` with `weights`, on the host or the device.

        With `around`, the batch is on the device already, where each batch of its iterations will be.
        """


class TorchSupport(Protocol):
    """Functions that the torch Learner and the policy server use on a type of torch's devices."""

    def why_not(self, device: torch.device) -> str | None:
        """Why torch cannot use the device; None if it can."""

    def graphs(self, device: torch.device) -> Graphs:
        """A new stream, for recordings."""

    def steps(
        self, trainer: TrainerLike, batch_type: type[Batch], device: torch.device, *, sub_batches: int, capture: bool
    ) -> DeviceSteps:
        """Steps of `trainer`, whose tensors are on the device; recorded with `capture`."""

    def iteration(
        self, device: torch.device, step: Step, fields: Sequence[str], replay: object, storage: object, batch_size: int
    ) -> FusedIteration | None:
        """Iterations on the device, whose `step` takes the columns `fields`; None if replay or storage is elsewhere."""
