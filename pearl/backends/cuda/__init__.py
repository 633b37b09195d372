"""NVIDIA GPUs, by PEARL's own kernels and through torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pearl.backends.cpu import TORCH_LEARNER, TORCH_ROLLOUT_LEARNER
from pearl.backends.protocol import (
    Backend,
    Discovered,
    Discovery,
    Factory,
    LearnerImplementation,
    LearnerParameters,
    ReplayImplementation,
    powers_of_two,
)
from pearl.devices.description import Availability, Device, DeviceKind
from pearl.devices.power import PowerMeter

if TYPE_CHECKING:
    from pearl.backends.torch_support import TorchSupport
    from pearl.spec import ReplaySpec

_MOST_STREAMS = 16


class CudaBackend(Backend):
    """Replay Manager, Data Storage and Learner by kernels that are compiled where the GPU is; and the torch Learner."""

    name = csv_name = "cuda"
    kinds = ("gpu",)
    factory_names = ("make_replay_manager", "CudaDataStorage", "CudaGae")
    kernels = "pearl._cuda"
    times_parts_apart = True

    def __init__(self) -> None:
        self.learners = {
            "torch": TORCH_LEARNER,
            "cuda": LearnerImplementation(
                "pearl.backends.cuda.learner", "CudaLearner", ("device",), compiled="pearl._cuda", own_memory=True
            ),
        }
        self.rollout_learners = {"torch": TORCH_ROLLOUT_LEARNER}
        self.replay_managers = {
            "cuda": ReplayImplementation("pearl.backends.cuda.replay", "CudaReplayManager", ("device",))
        }

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """An index, such as 'cuda:0', or the emulator."""
        from pearl.backends.cuda.device import cuda_name

        cuda_name(selector)

    def discover(self, search: Discovery) -> Discovered:
        """The GPUs that torch sees."""
        from pearl.backends.cuda.discovery import discover

        return discover(search)

    def availability(self, device: Device) -> Availability:
        """Whether torch, which is imported for this, sees the GPU."""
        from pearl.backends.cuda.device import cuda_availability, cuda_index

        return Availability(True) if self.emulated(device) else cuda_availability(cuda_index(device.selector))

    def candidates(self) -> Mapping[str, Device]:
        """One CUDA device."""
        return {"CUDA device": Device("cuda", "gpu", "cuda")}

    def hardware(self, device: Device) -> str:
        """The board and its driver."""
        from pearl.backends.cuda.device import cuda_identity, cuda_index

        return "emulator" if self.emulated(device) else cuda_identity(cuda_index(device.selector))

    def emulated(self, device: Device) -> bool:
        """Whether the selector is the emulator's."""
        from pearl.backends.cuda.device import EMULATOR

        return self.device_string(device) == EMULATOR

    def on_host_cores(self, device: Device) -> bool:
        """Only the emulator uses the host's cores."""
        return self.emulated(device)

    def note(self, device: Device) -> str:
        """The emulator is no GPU."""
        return (
            f"{device.name} is the emulator of CUDA's kernels: its speed means nothing."
            if self.emulated(device)
            else ""
        )

    def power_meter(self, device: Device) -> PowerMeter | None:
        """NVML; None if torch does not see the GPU."""
        from pearl.backends.cuda.device import cuda_index, cuda_uuid
        from pearl.backends.cuda.power import nvml_meter

        if self.emulated(device):
            return None
        uuid = cuda_uuid(cuda_index(device.selector))
        return None if uuid is None else nvml_meter(uuid)

    def is_failure(self, error: Exception) -> bool:
        """Out of memory, or an error of the driver."""
        return type(error).__name__ in ("OutOfMemoryError", "AcceleratorError")

    def torch_device(self, device: Device) -> str:
        """For example cuda:0; the host for the emulator."""
        return "cpu" if self.emulated(device) else self.device_string(device)

    def torch_support(self, device_type: str) -> TorchSupport | None:
        """CUDA graphs."""
        from pearl.backends.cuda.torch_support import CudaTorch

        return CudaTorch() if device_type == "cuda" else None

    def policy_device(self, device: Device) -> str | None:
        """For example cuda:0; None for the emulator."""
        return None if self.emulated(device) else self.device_string(device)

    def device_string(self, device: Device) -> str:
        """For example cuda:0."""
        from pearl.backends.cuda.device import cuda_name

        return cuda_name(device.selector)

    def replay(self, device: Device) -> Factory:
        """`make_replay_manager` with the name of this backend."""
        return Factory(
            "pearl.replay", "make_replay_manager", {"backend": self.name, "device": self.device_string(device)}
        )

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> str | None:
        """The options that it does not have."""
        from pearl.backends.on_device.replay import unsupported_options

        lacking = unsupported_options(spec)
        return f"the Replay Manager on CUDA devices does not have {', '.join(lacking)}" if lacking else None

    def storage(self, device: Device) -> Factory:
        """Columns in the GPU's memory."""
        return Factory("pearl.backends.cuda.storage", "CudaDataStorage")

    def reads_host_memory(self, device: Device) -> bool:
        """Pinned memory, without a copy."""
        return True

    def advantages(self, device: Device) -> Factory:
        """The scan on the GPU."""
        return Factory("pearl.backends.cuda.gae", "CudaGae", {"device": self.device_string(device)})

    def learner_parameters(
        self, device: Device, *, most_threads: int, most_sub_batches: int
    ) -> Sequence[LearnerParameters]:
        """Powers of two as numbers of sub-batches, each with its own stream."""
        counts = powers_of_two(min(most_sub_batches, _MOST_STREAMS))
        return [LearnerParameters(1, parts) for parts in counts]


BACKEND = CudaBackend()
