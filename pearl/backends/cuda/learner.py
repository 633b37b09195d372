"""The Learner by CUDA kernels: the built-in algorithms on networks of linear layers, in a few launches per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.cuda.runtime import open_cuda
from pearl.backends.on_device.learner import LearnerOnDevice

if TYPE_CHECKING:
    from pearl.backends.on_device import OpenDevice


class CudaLearner(LearnerOnDevice):
    """Trains `trainer` on the CUDA device `device`, a selector of the device CSV: a few launches a step."""

    backend = "cuda"

    def __init__(self, trainer: object, *, device: str = "cuda:0") -> None:
        super().__init__(trainer, device=device)

    def _open(self, device: str) -> OpenDevice:
        return open_cuda(device)
