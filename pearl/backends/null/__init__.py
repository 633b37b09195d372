"""The null device: it pretends to be any device, with the latencies that its selector states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.protocol import Backend, NoProgram
from pearl.devices.description import Device, DeviceKind

if TYPE_CHECKING:
    from pearl.spec import ReplaySpec

ESTIMATOR = "stated"


class NullBackend(Backend):
    """No hardware: it exercises placement and its tests."""

    name = csv_name = "null"
    kinds = ("cpu", "gpu", "fpga")
    is_here = False

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """The four latencies."""
        from pearl.backends.null.device import NullTimes

        NullTimes.parse(selector)

    def estimator(self, device: Device) -> str:
        """What the selector states."""
        return ESTIMATOR

    def messages_us(self, device: Device) -> float:
        """None are sent."""
        return 0.0

    @property
    def needs_messages(self) -> bool:
        """None are sent."""
        return False

    def no_program(self, device: Device) -> NoProgram:
        """Nothing runs there."""
        return NoProgram("a null device, which only pretends", "null devices")

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> None:
        """Nothing: it pretends."""

    def keeps_storage(self, device: Device, *, with_learner: bool) -> bool:
        """It pretends."""
        return True


BACKEND = NullBackend()
