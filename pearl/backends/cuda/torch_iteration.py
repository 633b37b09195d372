"""Setting 2 with the torch Learner: Replay Manager and Data Storage by PEARL's kernels on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.graphs import in_order_on
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.backends.torch_support import Step
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import mean_td_error

if TYPE_CHECKING:
    from pearl import _device

_UNREAD = 8  # iterations of which the host does not know the outcome yet, at most


def iteration_on(
    device: torch.device, step: Step, fields: Sequence[str], replay: object, storage: object, batch_size: int
) -> TorchIteration | None:
    """Iterations on `device`, whose `step` takes the columns `fields`; None if replay or storage is elsewhere."""
    if not isinstance(replay, CudaReplayManager) or not isinstance(storage, CudaDataStorage):
        return None
    if replay.queue is not storage.queue or storage.device != str(device):
        return None
    if not set(fields) <= {field.name for field in storage.spec.fields}:
        return None
    return TorchIteration(step, fields, replay, storage, batch_size)


class TorchIteration:
    """Iterations of setting 2 on one GPU: draw, gather, train and update, without a batch on the host.

    `step` trains on the columns `fields` with weights and returns priorities `(batch,)`, all on the device. The host
    reads the outcome of up to eight iterations at once. No other batches may be drawn on the device meanwhile.
    """

    def __init__(
        self, step: Step, fields: Sequence[str], replay: CudaReplayManager, storage: CudaDataStorage, batch_size: int
    ) -> None:
        self._step = step
        self._replay, self._storage, self._batch_size = replay.kernel, storage.kernel, batch_size
        queue = storage.queue
        self._stream: torch.cuda.Stream | None = None
        if storage.device != EMULATOR:
            place = torch.device(storage.device)
            self._stream = torch.cuda.ExternalStream(queue.stream, place)  # type: ignore[no-untyped-call, attr-defined]
        names = [field.name for field in storage.spec.fields]
        columns = dict(zip(names, self._storage.batch_there(batch_size), strict=True))
        self._columns = [self._tensor(columns[name]) for name in fields]
        self._priorities = [queue.device_floats(batch_size) for _ in range(_UNREAD)]
        self._written = [self._tensor(view) for view in self._priorities]
        self._drawn: _Drawn | None = None
        self._unread, self._td_errors = 0, 0.0
        self._last = 0  # place of the last iteration that was read

    def train(self, beta: float) -> None:
        """Begin an iteration with importance weights of exponent `beta`."""
        place = self._unread
        with self._in_order():
            self._replay.launch_sample(self._batch_size, beta, self._storage)
            if self._drawn is None:
                self._drawn = _Drawn(*map(self._tensor, self._replay.draw_there()))
            self._drawn.keep(place)
            self._written[place].copy_(self._step(self._columns, self._drawn.weights))
            self._replay.launch_update_there(self._priorities[place])
        self._unread += 1
        if self._unread == _UNREAD:
            self._read()

    def finish(self) -> float:
        """Wait for the iterations since the last call; the sum of their mean absolute TD errors.

        Raises TrainerError where one diverged.
        """
        self._read()
        found, self._td_errors = self._td_errors, 0.0
        return found

    def last_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots `(batch,)` int64 and importance weights `(batch,)` float32 of the last that was read, or diverged."""
        if self._drawn is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return self._drawn.kept(self._last)

    def _read(self) -> None:
        """Wait, and check the outcome of the iterations that the host does not know."""
        count, self._unread = self._unread, 0
        if count == 0:
            return
        with self._in_order():
            outcomes = torch.stack(self._written[:count]).cpu().numpy()  # which waits
        for self._last, priorities in enumerate(outcomes):
            self._td_errors += mean_td_error(priorities)
        self._replay.check()

    def _in_order(self) -> AbstractContextManager[None]:
        """Torch works on the stream of the kernels."""
        return nullcontext() if self._stream is None else in_order_on(self._stream)

    def _tensor(self, view: _device.DeviceView) -> torch.Tensor:
        """The memory of the kernels as a tensor."""
        if self._stream is None:
            return torch.from_numpy(np.asarray(_OnHost(view)))
        return torch.as_tensor(view, device=self._stream.device)


class _Drawn:
    """Slots and weights of the batch that was drawn, where the kernels write them, and of those not read yet."""

    def __init__(self, indices: torch.Tensor, weights: torch.Tensor) -> None:
        self._indices, self.weights = indices, weights
        self._kept = [tensor.new_empty((_UNREAD, len(tensor))) for tensor in (indices, weights)]

    def keep(self, place: int) -> None:
        """Copy them, for the host."""
        for kept, tensor in zip(self._kept, (self._indices, self.weights), strict=True):
            kept[place].copy_(tensor)

    def kept(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """A copy that was kept."""
        indices, weights = (kept[place].cpu().numpy().copy() for kept in self._kept)
        return indices, weights


class _OnHost:
    """The emulator's memory, as NumPy reads it."""

    def __init__(self, view: _device.DeviceView) -> None:
        self.__array_interface__ = view.__cuda_array_interface__
        self._view = view  # which keeps the memory
