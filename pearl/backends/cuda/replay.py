"""The Replay Manager on CUDA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.cuda.runtime import open_cuda
from pearl.backends.on_device.replay import ReplayManagerOnDevice, check_supported, unsupported_options
from pearl.replay.arguments import Selection, SelectionOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CudaReplayManager(ReplayManagerOnDevice):
    """ReplayManager in the memory of the CUDA device `device`, a selector of the device CSV.

    Samples, inserts, updates and retrieves in one launch each. Has the modes "prioritized" and "uniform", with
    replacement; raises ConfigurationError for other options, naming the backend that has them, and DeviceError where
    the device cannot be used or its free memory does not suffice. For the options see
    `pearl.replay.arguments.Selection`.
    """

    def __init__(self, capacity: int, *, device: str = "cuda:0", **options: Unpack[SelectionOptions]) -> None:
        chosen = Selection(**options)
        check_supported("CUDA devices", unsupported_options(chosen))
        super().__init__(capacity, chosen, open_cuda(device))
