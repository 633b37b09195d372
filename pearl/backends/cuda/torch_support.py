"""Support for torch on NVIDIA GPUs: steps and policies from CUDA graphs, and setting 2 with PEARL's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pearl.backends.torch_support import DeviceSteps, Graphs, Step

if TYPE_CHECKING:
    import torch

    from pearl.algorithms.batch import Batch
    from pearl.algorithms.trainer import TrainerLike
    from pearl.learner.protocol import FusedIteration


class CudaTorch:
    """Torch on a CUDA device. Nothing is imported before it is used."""

    def why_not(self, device: torch.device) -> str | None:
        """Torch was built without CUDA, or there is no such device."""
        from pearl.backends.cuda.device import cuda_availability

        available = cuda_availability(device.index or 0)
        return None if available.ok else available.reason

    def graphs(self, device: torch.device) -> Graphs:
        """CUDA graphs of the device."""
        from pearl.backends.cuda.graphs import CudaGraphs

        return CudaGraphs(device)

    def steps(
        self, trainer: TrainerLike, batch_type: type[Batch], device: torch.device, *, sub_batches: int, capture: bool
    ) -> DeviceSteps:
        """Steps in CUDA graphs, with a stream for each of `sub_batches` parts of a batch."""
        from pearl.backends.cuda.graphs import CudaGraphs
        from pearl.backends.cuda.torch_steps import TorchSteps

        return TorchSteps(trainer, batch_type, CudaGraphs(device), sub_batches=sub_batches, capture=capture)

    def iteration(
        self, device: torch.device, step: Step, fields: Sequence[str], replay: object, storage: object, batch_size: int
    ) -> FusedIteration | None:
        """With PEARL's Replay Manager and Data Storage on the same GPU."""
        from pearl.backends.cuda.torch_iteration import iteration_on

        return iteration_on(device, step, fields, replay, storage, batch_size)
