"""Setting 2 with the torch Learner: Replay Manager and Data Storage by PEARL's kernels on the same GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import mean_td_error

if TYPE_CHECKING:
    from pearl import _device

_UNREAD = 8  # iterations of which the host does not know the outcome yet, at most

Step = Callable[[Sequence["torch.Tensor"], "torch.Tensor"], "torch.Tensor"]


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
    """Iterations of setting 2 on one GPU: draw, gather, train and update, without the host between them.

    `step` trains on the columns `fields` with weights and returns priorities `(batch,)`, all on the device. The host
    reads the outcome of several iterations at once, so that what diverged is found some iterations later. No other
    batches may be drawn on the device meanwhile.
    """

    def __init__(
        self, step: Step, fields: Sequence[str], replay: CudaReplayManager, storage: CudaDataStorage, batch_size: int
    ) -> None:
        self._step = step
        self._replay, self._storage, self._batch_size = replay.kernel, storage.kernel, batch_size
        queue = storage.queue
        self._stream: torch.cuda.Stream | None = None
        if storage.device != EMULATOR:
            self._stream = torch.cuda.ExternalStream(queue.stream)  # type: ignore[no-untyped-call, attr-defined]
        names = [field.name for field in storage.spec.fields]
        columns = dict(zip(names, self._storage.batch_there(batch_size), strict=True))
        self._columns = [self._tensor(columns[name]) for name in fields]
        self._weights: torch.Tensor | None = None
        self._priorities = queue.device_floats(batch_size)
        self._written = self._tensor(self._priorities)
        self._unread: list[torch.Tensor] = []
        self._td_errors = 0.0

    def train(self, beta: float) -> None:
        """Begin an iteration with importance weights of exponent `beta`."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._replay.launch_sample(self._batch_size, beta, self._storage)
            if self._weights is None:
                self._weights = self._tensor(self._replay.weights_there())
            self._written.copy_(self._step(self._columns, self._weights))
            self._replay.launch_update_there(self._priorities)
            self._unread.append(self._written.clone())
        if len(self._unread) >= _UNREAD:
            self._read()

    def finish(self) -> float:
        """Wait for the iterations since the last call; the sum of their mean absolute TD errors.

        Raises TrainerError where one diverged.
        """
        self._read()
        found, self._td_errors = self._td_errors, 0.0
        return found

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self._td_errors += sum(mean_td_error(priorities.cpu().numpy()) for priorities in unread)
        self._replay.check()

    def last_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots `(batch,)` int64 and importance weights `(batch,)` float32 of the last iteration."""
        indices, weights, _ = self._replay.read_batch()
        return indices, weights

    def _tensor(self, view: _device.DeviceView) -> torch.Tensor:
        """The memory of the kernels as a tensor."""
        if self._stream is None:
            return torch.from_numpy(np.asarray(_OnHost(view)))
        return torch.as_tensor(view, device=self._stream.device)


class _OnHost:
    """The emulator's memory, as NumPy reads it."""

    def __init__(self, view: _device.DeviceView) -> None:
        self.__array_interface__ = view.__cuda_array_interface__
        self._view = view  # which keeps the memory
