"""The Replay Manager on SYCL devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pearl.backends.sycl.device import find_sycl_device, sycl_queue
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.errors import ConfigurationError
from pearl.replay.arguments import Selection, SelectionOptions
from pearl.replay.kernel import KernelReplayManager
from pearl.replay.memory import check_slots_fit, free_memory
from pearl.spec import ReplaySpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pearl import _native, _sycl

DEFAULT_DEVICE = "opencl:cpu"
_find_device = functools.cache(find_sycl_device)  # asking the driver takes milliseconds


class SyclReplayManager(KernelReplayManager):
    """ReplayManager in the memory of the SYCL device `device`, a selector of the device CSV.

    Samples, inserts, updates and retrieves in one launch each. Has the modes "prioritized" and "uniform", with
    replacement; raises ConfigurationError for other options, naming the backend that has them, CapacityError where the
    memory does not suffice, and DeviceError where the device cannot be used. For the options see
    `pearl.replay.arguments.Selection`.
    """

    _tree: _sycl.SumTree

    def __init__(self, capacity: int, *, device: str = DEFAULT_DEVICE, **options: Unpack[SelectionOptions]) -> None:
        chosen = Selection(**options)
        check_supported("SYCL devices", unsupported_options(chosen))
        slot = 8.0  # generation, times sampled
        if chosen.mode == "prioritized":
            slot += 8 + 8 / max(chosen.fanout - 1, 1)  # a priority, a leaf, and its share of the sums
        check_slots_fit(capacity, slot, device_memory(device), device)
        self.queue = sycl_queue(device)
        tree = sycl_runtime().module.SumTree(
            self.queue,
            capacity,
            chosen.fanout,
            chosen.mode,
            chosen.alpha,
            chosen.seed64,
            stratified=bool(chosen.stratified),
            initial_priority=chosen.initial_number,
            priority_epsilon=chosen.priority_epsilon,
        )
        super().__init__(tree, capacity, chosen)

    @property
    def kernel(self) -> _sycl.SumTree:
        """The kernel itself, for other kernels on its queue."""
        return self._tree

    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun:
        """Start a native thread that serves requests on this replay until stopped."""
        return self._tree.start_autorun(max_batch, depth)


def device_memory(device: str) -> int:
    """Upper bound, in bytes, of what another primitive may take on a SYCL device: the free memory, where known."""
    found = _find_device(device)
    return found.memory_bytes if found.kind == "gpu" else min(found.memory_bytes, free_memory())


def unsupported_options(options: Selection | ReplaySpec) -> list[str]:
    """The options, as a user writes them, that the Replay Manager on SYCL devices does not have."""
    found = {
        f"mode={options.mode!r}": options.mode not in ("prioritized", "uniform"),
        "replacement=False": not options.replacement,
        f"max_times_sampled={options.max_times_sampled}": options.max_times_sampled != 0,
        'initial_priority="mean"': options.initial_priority == "mean",
    }
    return [option for option, unsupported in found.items() if unsupported]


def check_supported(devices: str, unsupported: list[str]) -> None:
    """Raise ConfigurationError if a Replay Manager on `devices` was asked for `unsupported` options."""
    if unsupported:
        raise ConfigurationError(
            f"The Replay Manager on {devices} does not have {', '.join(unsupported)}. The CPU's has: "
            'backend="native", on a device of the backend "cpu".'
        )
