"""Data Storage in the memory of a SYCL device."""

from __future__ import annotations

from pearl.backends.on_device.storage import DataStorageOnDevice
from pearl.backends.sycl.replay import DEFAULT_DEVICE, device_memory, open_sycl
from pearl.replay.memory import check_fits
from pearl.spec import TransitionSpec


class SyclDataStorage(DataStorageOnDevice):
    """Ring of `capacity` transitions on the SYCL device `device`; the same interface as DataStorage.

    Inserts and gathers in one launch each. Raises CapacityError if the memory that is free does not suffice,
    DeviceError if the device cannot be used or takes less in one piece than a column needs.
    """

    def __init__(self, spec: TransitionSpec, capacity: int, device: str = DEFAULT_DEVICE) -> None:
        self.device = device
        check_fits(capacity, spec.nbytes, device_memory(device))
        super().__init__(spec, capacity, open_sycl(device))
