"""The Replay Manager on SYCL devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pearl.backends.on_device import OpenDevice
from pearl.backends.on_device.replay import ReplayManagerOnDevice, check_fits, check_supported, unsupported_options
from pearl.backends.sycl.device import find_sycl_device, sycl_queue
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.replay.arguments import Selection, SelectionOptions
from pearl.replay.memory import free_memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_DEVICE = "opencl:cpu"
_find_device = functools.cache(find_sycl_device)  # asking the driver takes milliseconds


class SyclReplayManager(ReplayManagerOnDevice):
    """ReplayManager in the memory of the SYCL device `device`, a selector of the device CSV.

    Samples, inserts, updates and retrieves in one launch each. Has the modes "prioritized" and "uniform", with
    replacement; raises ConfigurationError for other options, naming the backend that has them, CapacityError where the
    memory does not suffice, and DeviceError where the device cannot be used. For the options see
    `pearl.replay.arguments.Selection`.
    """

    def __init__(self, capacity: int, *, device: str = DEFAULT_DEVICE, **options: Unpack[SelectionOptions]) -> None:
        chosen = Selection(**options)
        check_supported("SYCL devices", unsupported_options(chosen))
        check_fits(capacity, chosen, device_memory(device), device)
        super().__init__(capacity, chosen, open_sycl(device))


def open_sycl(device: str) -> OpenDevice:
    """The SYCL device of a selector; DeviceError if it is not there."""
    return OpenDevice(sycl_queue(device), sycl_runtime().module)


def device_memory(device: str) -> int:
    """Upper bound, in bytes, of what another primitive may take on a SYCL device: the free memory, where known."""
    found = _find_device(device)
    return found.memory_bytes if found.kind == "gpu" else min(found.memory_bytes, free_memory())
