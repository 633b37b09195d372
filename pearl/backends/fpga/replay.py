"""The Replay Manager on an FPGA: autorun kernels, one for each level of the sum tree, joined by pipes."""

from __future__ import annotations

import contextlib
import operator
import weakref
from typing import TYPE_CHECKING

from pearl.backends.on_device.replay import check_supported, unsupported_options
from pearl.backends.sycl.device import find_sycl_device, sycl_queue
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.errors import CapacityError, ConfigurationError, DeviceError
from pearl.replay.arguments import Selection, SelectionOptions
from pearl.replay.kernel import KernelReplayManager
from pearl.spec import ReplaySpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pearl import _sycl

SLOTS_MAX = 2**20
LEVELS_MAX = 16  # below the root: each is a kernel, and all run at the same time
TIMEOUT_S = 120.0


class FpgaReplayManager(KernelReplayManager):
    """ReplayManager as a pipeline on an FPGA, with a stage for each level of the tree (PEARL Sec. V-A, Fig. 6).

    Its kernels are generated for the capacity and fanout, compiled (seconds; kept on disk), launched once, and serve
    requests until `close`. Has the mode "prioritized" with replacement, up to `SLOTS_MAX` slots in `LEVELS_MAX`
    levels; raises ConfigurationError for other options, naming the backend that has them, CapacityError for larger
    trees, and DeviceError where the device cannot be used. If the pipeline does not answer within `timeout_s` seconds
    (plus 1 ms for each item), or the device fails, this call and all later ones raise DeviceError. For the options see
    `pearl.replay.arguments.Selection`.
    """

    _tree: _sycl.FpgaSumTree

    def __init__(
        self,
        capacity: int,
        *,
        device: str = EMULATOR_SELECTOR,
        timeout_s: float = TIMEOUT_S,
        **options: Unpack[SelectionOptions],
    ) -> None:
        chosen = Selection(**options)
        check_design(chosen)
        check_tree(capacity, chosen.fanout)
        check_fpga(device, "Replay Manager", timeout_s)
        self.device = device
        tree = sycl_runtime().module.FpgaSumTree(
            sycl_queue(device),
            capacity,
            chosen.fanout,
            chosen.alpha,
            chosen.seed64,
            stratified=bool(chosen.stratified),
            initial_priority=chosen.initial_number,
            priority_epsilon=chosen.priority_epsilon,
            timeout_s=timeout_s,
        )
        super().__init__(tree, capacity, chosen)
        self._stop = stop_at_exit(self, tree)

    @property
    def kernel(self) -> _sycl.FpgaSumTree:
        """The pipeline itself."""
        return self._tree

    @property
    def level_bits(self) -> tuple[int, ...]:
        """Bits of a node on each level, the root's first: 28 at the leaves, log2(fanout) more a level (CF'22, 3.1)."""
        return tuple(self._tree.level_bits)


def stop_at_exit(
    owner: object, kernel: _sycl.FpgaSumTree | _sycl.FpgaLearner | _sycl.FpgaGae
) -> weakref.finalize[..., object]:
    """Close `kernel` when `owner` is collected or the interpreter ends: its stages would run until the process ends."""
    return weakref.finalize(owner, _close, kernel)


def _close(kernel: _sycl.FpgaSumTree | _sycl.FpgaLearner | _sycl.FpgaGae) -> None:
    with contextlib.suppress(DeviceError):  # the device failed: an earlier call has reported it
        kernel.close()


def tree_levels(capacity: int, fanout: int) -> int:
    """Levels below the root that a tree of `capacity` slots has."""
    levels, slots = 1, fanout
    while slots < capacity:
        levels, slots = levels + 1, slots * fanout
    return levels


def check_design(options: Selection | ReplaySpec) -> None:
    """Raise ConfigurationError for options that no Replay Manager on an FPGA has, whatever its size."""
    uniform = ["mode='uniform'"] if options.mode == "uniform" else []
    check_supported("FPGAs", uniform + unsupported_options(options))


def check_tree(capacity: int, fanout: int) -> None:
    """Raise CapacityError if the tree has more slots or levels than an FPGA's program may have."""
    if operator.index(capacity) > SLOTS_MAX:
        raise CapacityError(
            f"The Replay Manager on an FPGA keeps its tree in on-chip memory, at most {SLOTS_MAX:,} slots; found "
            f"{capacity:,}. Lower `size`, or place it on another device."
        )
    if capacity < 1 or fanout < 2:
        return  # the kernel's own message is better
    levels = tree_levels(capacity, fanout)
    if levels > LEVELS_MAX:
        needed = next(2**bits for bits in range(1, 9) if tree_levels(capacity, 2**bits) <= LEVELS_MAX)
        raise CapacityError(
            f"The Replay Manager on an FPGA has a kernel for each level of its tree, at most {LEVELS_MAX}; "
            f"{capacity:,} slots with a fanout of {fanout} need {levels}. Choose a fanout of at least {needed}."
        )


def check_fpga(device: str, primitive: str, timeout_s: float) -> None:
    """Raise DeviceError unless `device` selects an FPGA that runs PEARL's autorun kernels; check `timeout_s` too."""
    if not 0 < timeout_s < float("inf"):
        raise ConfigurationError(f"timeout_s must be a number of seconds above 0; found {timeout_s!r}.")
    found = find_sycl_device(device)
    if found.kind != "fpga":
        raise DeviceError(
            f"The {primitive} of autorun kernels needs an FPGA or its emulator; {device!r} is a {found.kind} "
            f'({found.name}). Choose backend="sycl" for it.'
        )
    if not found.emulated:
        raise DeviceError(
            f"{found.name} takes programs that were compiled ahead of time, which PEARL cannot load yet; only the "
            f"emulator ({EMULATOR_SELECTOR!r}) compiles them when they are needed."
        )
