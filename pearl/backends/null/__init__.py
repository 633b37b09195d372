"""The null device: no hardware; its selector states the latencies. It serves tests of placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.protocol import Backend, NoProgram
from pearl.devices.description import Device, DeviceKind

if TYPE_CHECKING:
    from pearl.spec import ReplaySpec

ESTIMATOR = "stated"


class NullBackend(Backend):
    """Devices without hardware, of any kind."""

    name = csv_name = "null"
    kinds = ("cpu", "gpu", "fpga")
    is_here = False

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """The four latencies, and optionally `sharing`."""
        from pearl.backends.null.device import NullTimes

        NullTimes.parse(selector)

    def estimator(self, device: Device) -> str:
        """The times that the selector states."""
        return ESTIMATOR

    def messages_us(self, device: Device) -> float:
        """No messages are sent."""
        return 0.0

    @property
    def needs_messages(self) -> bool:
        """No messages are sent."""
        return False

    def no_program(self, device: Device) -> NoProgram:
        """No program runs on a null device."""
        return NoProgram("a null device, which only pretends", "null devices")

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> None:
        """A null device accepts every Replay Manager."""

    def keeps_storage(self, device: Device, *, with_learner: bool) -> bool:
        """A null device accepts the Data Storage."""
        return True


BACKEND = NullBackend()
