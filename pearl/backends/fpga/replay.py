"""The Replay Manager on an FPGA: autorun kernels, one for each level of the sum tree, joined by pipes."""

from __future__ import annotations

import contextlib
import operator
import weakref
from typing import TYPE_CHECKING

from pearl.backends.sycl.device import find_sycl_device, sycl_queue
from pearl.backends.sycl.replay import unsupported_options
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.errors import CapacityError, ConfigurationError, DeviceError
from pearl.replay.arguments import check_epsilon, check_selection
from pearl.replay.kernel import KernelReplayManager
from pearl.spec import InitialPriority, ReplayMode, ReplaySpec

if TYPE_CHECKING:
    from pearl import _sycl

SLOTS_MAX = 2**20
LEVELS_MAX = 16  # below the root: kernels that run side by side
_TIMEOUT_S = 120.0


class FpgaReplayManager(KernelReplayManager):
    """ReplayManager as a pipeline on an FPGA, with a stage for each level of the tree (PEARL Sec. V-A, Fig. 6).

    Its kernels are generated for the capacity and fanout, compiled (seconds; kept on disk), launched once, and serve
    requests until `close`. Has the mode "prioritized" with replacement, up to `SLOTS_MAX` slots in `LEVELS_MAX`
    levels; raises ConfigurationError for other options, naming the backend that has them, CapacityError for larger
    trees, and DeviceError where the device cannot be used. A pipeline that does not answer within `timeout_s` seconds
    (and 1 ms for each item), or a device that fails, raises DeviceError, from then on at every call.
    """

    _tree: _sycl.FpgaSumTree

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
        device: str = EMULATOR_SELECTOR,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        check_selection(mode, max_times_sampled, initial_priority)
        check_epsilon(priority_epsilon)
        check_options(capacity, fanout, mode, replacement, max_times_sampled, initial_priority)
        if not 0 < timeout_s < float("inf"):
            raise ConfigurationError(f"timeout_s must be a number of seconds above 0; found {timeout_s!r}.")
        check_fpga(device, "Replay Manager")
        self.device = device
        tree = sycl_runtime().module.FpgaSumTree(
            sycl_queue(device),
            capacity,
            fanout,
            alpha,
            operator.index(seed) % 2**64,
            stratified=bool(stratified),
            initial_priority=0.0 if isinstance(initial_priority, str) else initial_priority,
            priority_epsilon=priority_epsilon,
            timeout_s=timeout_s,
        )
        super().__init__(tree, capacity, fanout, mode, max_times_sampled)
        # At the exit of the interpreter too: stages that nobody stops would run until the process is gone.
        self._stop = weakref.finalize(self, _stop, tree)

    @property
    def kernel(self) -> _sycl.FpgaSumTree:
        """The pipeline itself."""
        return self._tree

    @property
    def level_bits(self) -> tuple[int, ...]:
        """Bits of a node on each level, the root's first: 28 at the leaves, log2(fanout) more a level (CF'22, 3.1)."""
        return tuple(self._tree.level_bits)


def _stop(tree: _sycl.FpgaSumTree) -> None:
    with contextlib.suppress(DeviceError):  # it stands still, and whoever used it was told
        tree.close()


def tree_levels(capacity: int, fanout: int) -> int:
    """Levels below the root that a tree of `capacity` slots has."""
    levels, slots = 1, fanout
    while slots < capacity:
        levels, slots = levels + 1, slots * fanout
    return levels


def check_design(spec: ReplaySpec) -> None:
    """Raise ConfigurationError where no Replay Manager on an FPGA, of whatever size, has the options of `spec`."""
    _check_selection(spec.mode, spec.replacement, spec.max_times_sampled, spec.initial_priority)


def _check_selection(mode: ReplayMode, replacement: bool, limit: int, initial_priority: InitialPriority) -> None:
    unsupported = unsupported_options(mode, replacement, limit, initial_priority)
    if mode == "uniform":
        unsupported.insert(0, "mode='uniform'")
    if unsupported:
        raise ConfigurationError(
            f"The Replay Manager on FPGAs does not have {', '.join(unsupported)}. The CPU's has: "
            'backend="native", on a device of the backend "cpu".'
        )


def check_options(
    capacity: int,
    fanout: int,
    mode: ReplayMode,
    replacement: bool,
    limit: int,
    initial_priority: InitialPriority,
) -> None:
    """Raise what FpgaReplayManager raises for options that it does not have; `limit` is max_times_sampled."""
    _check_selection(mode, replacement, limit, initial_priority)
    _check_capacity(capacity, fanout)


def _check_capacity(capacity: int, fanout: int) -> None:
    """Raise CapacityError where the tree has more slots or levels than an FPGA's program may have."""
    if operator.index(capacity) > SLOTS_MAX:
        raise CapacityError(
            f"The Replay Manager on an FPGA keeps its tree in on-chip memory, at most {SLOTS_MAX:,} slots; found "
            f"{capacity:,}. Lower `size`, or place it on another device."
        )
    if capacity < 1 or fanout < 2:
        return  # the kernel refuses that with its own words
    levels = tree_levels(capacity, fanout)
    if levels > LEVELS_MAX:
        needed = next(2**bits for bits in range(1, 9) if tree_levels(capacity, 2**bits) <= LEVELS_MAX)
        raise CapacityError(
            f"The Replay Manager on an FPGA has a kernel for each level of its tree, at most {LEVELS_MAX}; "
            f"{capacity:,} slots with a fanout of {fanout} need {levels}. Choose a fanout of at least {needed}."
        )


def check_fpga(device: str, primitive: str) -> None:
    """Raise DeviceError unless `device` is a selector of an FPGA that runs PEARL's autorun kernels."""
    found = find_sycl_device(device)
    if found.kind != "fpga":
        raise DeviceError(
            f"The {primitive} of autorun kernels needs an FPGA or its emulator; {device!r} is a {found.kind} "
            f'({found.name}). Choose backend="sycl" for it.'
        )
    if not found.emulated:
        raise DeviceError(
            f"{found.name} takes programs that were compiled ahead of time, which PEARL cannot load yet; only the "
            f"emulator ({EMULATOR_SELECTOR!r}) compiles them as they are needed."
        )
