"""The Replay Manager on SYCL devices."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

from pearl.backends.sycl.device import find_sycl_device, sycl_queue
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.byte_size import readable_size
from pearl.errors import CapacityError, ConfigurationError
from pearl.replay.arguments import check_epsilon, check_selection
from pearl.replay.kernel import KernelReplayManager
from pearl.replay.memory import free_memory
from pearl.spec import InitialPriority, ReplayMode

if TYPE_CHECKING:
    from pearl import _native, _sycl

DEFAULT_DEVICE = "opencl:cpu"
_CAPACITY_MAX = 2**36
_find_device = functools.cache(find_sycl_device)  # asking the driver takes milliseconds


class SyclReplayManager(KernelReplayManager):
    """ReplayManager in the memory of the SYCL device `device`, a selector of the device CSV.

    Samples, inserts, updates and retrieves in one launch each. Has the modes "prioritized" and "uniform", with
    replacement; raises ConfigurationError for other options, naming the backend that has them, CapacityError where the
    memory does not suffice, and DeviceError where the device cannot be used.
    """

    _tree: _sycl.SumTree

    def __init__(
        self,
        capacity: int,
        *,
        fanout: int = 16,
        mode: ReplayMode = "prioritized",
        alpha: float = 0.6,
        seed: int = 0,
        stratified: bool = True,
        replacement: bool = True,
        max_times_sampled: int = 0,
        initial_priority: InitialPriority = "max",
        priority_epsilon: float = 0.0,
        device: str = DEFAULT_DEVICE,
    ) -> None:
        check_selection(mode, max_times_sampled, initial_priority)
        check_epsilon(priority_epsilon)
        _check_supported(mode, replacement, max_times_sampled, initial_priority)
        _check_memory(capacity, fanout, mode, device)
        self.queue = sycl_queue(device)
        tree = sycl_runtime().module.SumTree(
            self.queue,
            capacity,
            fanout,
            mode,
            alpha,
            operator.index(seed) % 2**64,
            stratified=bool(stratified),
            initial_priority=0.0 if isinstance(initial_priority, str) else initial_priority,
            priority_epsilon=priority_epsilon,
        )
        super().__init__(tree, capacity, fanout, mode, max_times_sampled)

    @property
    def kernel(self) -> _sycl.SumTree:
        """The kernel itself, for other kernels on its queue."""
        return self._tree

    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun:
        """Start a native thread that serves requests on this replay until stopped."""
        return self._tree.start_autorun(max_batch, depth)


def device_memory(device: str) -> int:
    """Bytes that one more primitive on a SYCL device may take at most: what is free, where that can be told."""
    found = _find_device(device)
    return found.memory_bytes if found.kind == "gpu" else min(found.memory_bytes, free_memory())


def unsupported_options(
    mode: ReplayMode, replacement: bool, max_times_sampled: int, initial_priority: InitialPriority
) -> list[str]:
    """Which of the options the Replay Manager on SYCL devices does not have, as they are written."""
    return [
        named
        for named, wanted in (
            (f"mode={mode!r}", mode not in ("prioritized", "uniform")),
            ("replacement=False", not replacement),
            (f"max_times_sampled={max_times_sampled}", max_times_sampled != 0),
            ('initial_priority="mean"', initial_priority == "mean"),
        )
        if wanted
    ]


def _check_supported(mode: ReplayMode, replacement: bool, limit: int, initial_priority: InitialPriority) -> None:
    unsupported = unsupported_options(mode, replacement, limit, initial_priority)
    if unsupported:
        raise ConfigurationError(
            f"The Replay Manager on SYCL devices does not have {', '.join(unsupported)}. The CPU's has: "
            'backend="native", on a device of the backend "cpu".'
        )


def _check_memory(capacity: int, fanout: int, mode: ReplayMode, device: str) -> None:
    """Raise CapacityError where the slots and their trees need more memory than the device has."""
    if not 1 <= operator.index(capacity) <= _CAPACITY_MAX:
        return  # the kernel refuses that with its own words
    slot = 8.0  # generation, times sampled
    if mode == "prioritized":
        slot += 8 + 8 / max(fanout - 1, 1)  # a priority, a leaf, and its share of the sums
    needed, free = capacity * slot, device_memory(device)
    if needed > free:
        raise CapacityError(
            f"A Replay Manager of {capacity:,} slots needs {readable_size(needed)}; {readable_size(free)} of memory "
            f"are free on {device}. Lower `size`."
        )
