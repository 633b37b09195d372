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
from pearl.backends.torch_support import Around, Launch, Step
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import mean_td_error

if TYPE_CHECKING:
    from pearl import _device

_UNREAD = 8  # the most iterations whose outcome the host has not read yet


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

    `step` trains on the columns `fields` with weights and returns priorities `(batch,)`, all on the device. If steps
    are recorded, so is the whole iteration. The host reads the outcome of up to eight iterations at once. No other
    batches may be drawn on the device meanwhile.
    """

    def __init__(
        self, step: Step, fields: Sequence[str], replay: CudaReplayManager, storage: CudaDataStorage, batch_size: int
    ) -> None:
        self._step = step
        self._replay, self._storage, self._batch_size = replay.kernel, storage.kernel, batch_size
        self._queue = queue = storage.queue
        self._stream: torch.cuda.Stream | None = None
        if storage.device != EMULATOR:
            place = torch.device(storage.device)
            self._stream = torch.cuda.ExternalStream(queue.stream, place)  # type: ignore[no-untyped-call, attr-defined]
        names = [field.name for field in storage.spec.fields]
        columns = dict(zip(names, self._storage.batch_there(batch_size), strict=True))
        self._columns = [self._tensor(columns[name]) for name in fields]
        self._given = queue.device_floats(batch_size)  # the priorities, for the kernels
        self._priorities = self._tensor(self._given)
        self._kept: _Kept | None = None
        self._unread, self._td_errors = 0, 0.0
        self._last = 0  # place of the last iteration that was read

    def train(self, beta: float) -> None:
        """Begin an iteration with importance weights of exponent `beta`."""
        with self._in_order():
            self._replay.prepare_iteration(self._batch_size, beta)
            if self._kept is None:
                indices, weights = map(self._tensor, self._replay.draw_there())
                self._kept = _Kept(indices, weights, self._priorities, (self._replay, self._storage, self._given))
            # Made again each time: an attribute would make a reference cycle, which keeps the device's memory for
            # longer.
            around = Around(self._draw, self._update, self._stream, self._kept)
            try:
                self._step(self._columns, self._kept.weights, around)
            except BaseException:
                self._kept.go_on_at(self._unread)
                raise
        self._unread += 1
        if self._unread == _UNREAD:
            self._read()

    def _draw(self, launch: Launch) -> None:
        launch(self._queue, lambda: self._replay.launch_draw(self._storage))

    def _update(self, launch: Launch, priorities: torch.Tensor) -> None:
        assert self._kept is not None
        self._priorities.copy_(priorities.detach())
        self._kept.keep()
        launch(self._queue, lambda: self._replay.launch_update_there(self._given))

    def finish(self) -> float:
        """Wait for the iterations since the last call; the sum of their mean absolute TD errors.

        Raises TrainerError where one diverged.
        """
        self._read()
        found, self._td_errors = self._td_errors, 0.0
        return found

    def last_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots `(batch,)` int64 and importance weights `(batch,)` float32 of the last that was read, or diverged."""
        if self._kept is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return self._kept.batch(self._last)

    def _read(self) -> None:
        """Wait, and check the outcomes that the host has not read yet."""
        count, self._unread = self._unread, 0
        if count == 0 or self._kept is None:
            return
        with self._in_order():
            outcomes = self._kept.outcomes(count)
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


class _Kept:
    """Copies of the batches that were drawn, and of their priorities, which the host has not read yet."""

    def __init__(self, indices: torch.Tensor, weights: torch.Tensor, priorities: torch.Tensor, memory: object) -> None:
        self.weights = weights
        self._memory = memory  # that recordings use
        self._sources = (indices, weights, priorities)
        self._copies = [source.new_zeros((_UNREAD, len(source))) for source in self._sources]
        self._place = indices.new_zeros(1)  # on the device, as recordings are the same for all places

    def keep(self) -> None:
        """Copy the iteration's present batch and priorities, on the device."""
        for copies, source in zip(self._copies, self._sources, strict=True):
            copies.index_copy_(0, self._place, source[None])
        self._place.add_(1)

    def outcomes(self, count: int) -> np.ndarray:
        """Wait for the `count` iterations since the last call; their priorities `(count, batch)`."""
        found: np.ndarray = self._copies[2][:count].cpu().numpy()
        self.go_on_at(0)
        return found.copy()

    def go_on_at(self, place: int) -> None:
        """Keep the next iteration's there."""
        self._place.fill_(place)

    def batch(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots and weights of an iteration that was read last."""
        indices, weights = (copies[place].cpu().numpy().copy() for copies in self._copies[:2])
        return indices, weights


class _OnHost:
    """The emulator's memory, as NumPy reads it."""

    def __init__(self, view: _device.DeviceView) -> None:
        self.__array_interface__ = view.__cuda_array_interface__
        self._view = view  # which keeps the memory
