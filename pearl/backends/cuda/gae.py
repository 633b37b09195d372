"""Generalized advantage estimation on CUDA devices."""

from __future__ import annotations

from pearl.backends.cuda.runtime import open_cuda
from pearl.backends.on_device.gae import GaeOnDevice


class CudaGae(GaeOnDevice):
    """AdvantageEstimator on the CUDA device `device`, a selector of the device CSV: one lane for each environment.

    Each call is one launch. Raises ConfigurationError unless `gamma` and `gae_lambda` lie in [0, 1], DeviceError if the
    device cannot be used.
    """

    backend = "cuda"

    def __init__(self, gamma: float, gae_lambda: float, device: str = "cuda:0") -> None:
        opened = open_cuda(device)
        super().__init__(opened.module.Gae(opened.queue, gamma, gae_lambda))
