"""The Replay Manager in the memory of a parallel device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.errors import ConfigurationError
from pearl.replay.arguments import Selection
from pearl.replay.kernel import KernelReplayManager
from pearl.replay.memory import check_slots_fit
from pearl.spec import ReplaySpec

if TYPE_CHECKING:
    from pearl import _device, _native
    from pearl.backends.on_device import OpenDevice


class ReplayManagerOnDevice(KernelReplayManager):
    """ReplayManager on the queue of a device. An insertion, update or retrieval is one launch, a draw one or two."""

    _tree: _device.SumTree

    def __init__(self, capacity: int, chosen: Selection, device: OpenDevice) -> None:
        self.queue = device.queue
        tree = device.module.SumTree(
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
    def kernel(self) -> _device.SumTree:
        """The kernel itself, for other kernels on its queue."""
        return self._tree

    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun:
        """Start a native thread that serves requests on this replay until stopped."""
        return self._tree.start_autorun(max_batch, depth)


def check_fits(capacity: int, chosen: Selection, memory_bytes: int, device: str) -> None:
    """Raise CapacityError if a Replay Manager of so many slots does not fit `memory_bytes` of `device`."""
    slot = 16.0  # priority, generation, times sampled, claim: ReplaySlot in replay_kernels.hpp
    if chosen.mode == "prioritized":
        slot += 4 + 8 / max(chosen.fanout - 1, 1)  # a leaf, and its share of the sums
    check_slots_fit(capacity, slot, memory_bytes, device)


def unsupported_options(options: Selection | ReplaySpec) -> list[str]:
    """The options, as a user writes them, that the Replay Managers of CUDA, SYCL and FPGA lack."""
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
