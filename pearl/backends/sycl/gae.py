"""Generalized advantage estimation on SYCL devices."""

from __future__ import annotations

from pearl.backends.on_device.gae import GaeOnDevice
from pearl.backends.sycl.replay import DEFAULT_DEVICE, open_sycl


class SyclGae(GaeOnDevice):
    """AdvantageEstimator on the SYCL device `device`, a selector of the device CSV: one lane for each environment.

    Each call is one launch. Raises ConfigurationError unless `gamma` and `gae_lambda` lie in [0, 1], DeviceError if the
    device cannot be used.
    """

    backend = "sycl"

    def __init__(self, gamma: float, gae_lambda: float, device: str = DEFAULT_DEVICE) -> None:
        opened = open_sycl(device)
        super().__init__(opened.module.Gae(opened.queue, gamma, gae_lambda))
