"""SYCL devices except FPGAs: Intel's CPU device and Intel GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pearl.backends.protocol import (
    Backend,
    Discovered,
    Discovery,
    Factory,
    HostCores,
    LearnerImplementation,
    LearnerParameters,
    ReplayImplementation,
)
from pearl.backends.sycl.selector import sycl_filter
from pearl.devices.description import Availability, Device, DeviceKind
from pearl.errors import DeviceError

if TYPE_CHECKING:
    from pearl.spec import ReplaySpec


class SyclDevices(Backend):
    """The common base of the backends on the SYCL runtime."""

    csv_name = "sycl"
    kernels = "pearl._sycl"
    factory_names: tuple[str, ...] = ("make_replay_manager", "SyclDataStorage")

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """One of dpctl's filter strings, or a short form of one."""
        sycl_filter(selector, kind)

    def availability(self, device: Device) -> Availability:
        """Whether the SYCL runtime, which is loaded for this, lists the device."""
        from pearl.backends.sycl.device import sycl_availability

        return sycl_availability(self.device_string(device))

    def device_string(self, device: Device) -> str:
        """The selector, as dpctl's filter string."""
        return sycl_filter(device.selector, device.kind)

    def replay(self, device: Device) -> Factory:
        """`make_replay_manager` with the name of this backend."""
        selected = {"backend": self.name, "device": self.device_string(device)}
        return Factory("pearl.replay", "make_replay_manager", selected)

    def storage(self, device: Device) -> Factory:
        """Columns in the device's memory."""
        return Factory("pearl.backends.sycl.storage", "SyclDataStorage")


class SyclBackend(SyclDevices):
    """PEARL's kernels on the queue of a device."""

    name = "sycl"
    factory_names = (*SyclDevices.factory_names, "SyclGae")
    kinds = ("cpu", "gpu")
    host_cores: HostCores = "all"
    times_parts_apart = True

    def __init__(self) -> None:
        self.learners = {
            "sycl": LearnerImplementation(
                "pearl.backends.sycl.learner", "SyclLearner", ("device",), compiled="pearl._sycl", own_memory=True
            )
        }
        self.replay_managers = {
            "sycl": ReplayImplementation("pearl.backends.sycl.replay", "SyclReplayManager", ("device",))
        }

    def discover(self, search: Discovery) -> Discovered:
        """All devices that the runtime lists, including FPGAs and their emulator."""
        from pearl.backends.sycl.discovery import discover

        return discover(search)

    def candidates(self) -> Mapping[str, Device]:
        """One of each kind; a single device if there is no runtime at all."""
        from pearl.backends.sycl.device import sycl_devices

        try:
            sycl_devices()
        except DeviceError:
            return {"SYCL device": Device("sycl", "cpu", "sycl")}
        return {
            "SYCL CPU": Device("sycl", "cpu", "sycl"),
            "Intel GPU": Device("sycl", "gpu", "sycl"),
            "FPGA": Device("sycl", "fpga", "sycl"),
        }

    def hardware(self, device: Device) -> str:
        """The device, its driver and the runtime."""
        from pearl.backends.sycl.device import sycl_identity

        return sycl_identity(self.device_string(device))

    def on_host_cores(self, device: Device) -> bool:
        """Only the CPU device uses the host's cores."""
        return device.kind == "cpu"

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> str | None:
        """The options that it does not have."""
        from pearl.backends.on_device.replay import unsupported_options

        lacking = unsupported_options(spec)
        return f"the Replay Manager on SYCL devices does not have {', '.join(lacking)}" if lacking else None

    def advantages(self, device: Device) -> Factory:
        """The scan on the device."""
        return Factory("pearl.backends.sycl.gae", "SyclGae", {"device": self.device_string(device)})

    def learner_parameters(
        self, device: Device, *, most_threads: int, most_sub_batches: int
    ) -> Sequence[LearnerParameters]:
        """One combination: the runtime distributes a launch over all of the device's cores."""
        return [LearnerParameters(device.cores or 1)]


BACKEND = SyclBackend()
