"""The Learner on SYCL devices: the built-in algorithms on networks of linear layers, in a few launches per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.on_device.learner import LearnerOnDevice
from pearl.backends.sycl.replay import DEFAULT_DEVICE, open_sycl

if TYPE_CHECKING:
    from pearl.backends.on_device import OpenDevice


class SyclLearner(LearnerOnDevice):
    """Trains `trainer` on the SYCL device `device`, a selector of the device CSV: a few launches a step."""

    backend = "sycl"

    def __init__(self, trainer: object, *, device: str = DEFAULT_DEVICE) -> None:
        super().__init__(trainer, device=device)

    def _open(self, device: str) -> OpenDevice:
        return open_sycl(device)
