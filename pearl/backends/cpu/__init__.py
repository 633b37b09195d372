"""The CPU of this machine: the host, and a device for every primitive."""

from __future__ import annotations

from collections.abc import Sequence

from pearl.backends.protocol import (
    Backend,
    Discovered,
    Discovery,
    Factory,
    HostCores,
    LearnerImplementation,
    LearnerParameters,
    ReplayImplementation,
    RolloutLearnerImplementation,
    powers_of_two,
)
from pearl.devices.description import Connection, Device, DeviceKind
from pearl.devices.power import PowerMeter
from pearl.errors import ConfigurationError

TORCH_LEARNER = LearnerImplementation(
    "pearl.learner.torch_learner", "TorchLearner", ("device", "threads", "sub_batches"), spins=True
)

_SHARED_BATCH = 4096  # two chunks of kernels/include/pearl/sum_tree_replay.hpp: smaller batches have one thread

TORCH_ROLLOUT_LEARNER = RolloutLearnerImplementation(
    "pearl.learner.torch_rollout_learner", "TorchRolloutLearner", ("threads",), spins=True
)


class CpuBackend(Backend):
    """Native C++ kernels, or torch, on threads of this process."""

    name = csv_name = "cpu"
    kinds = ("cpu",)
    host_cores: HostCores = "threads"
    factory_names = ("make_replay_manager", "NativeGae")

    def __init__(self) -> None:
        self.learners = {
            "torch": TORCH_LEARNER,
            "native": LearnerImplementation(
                "pearl.backends.cpu.learner", "NativeLearner", ("threads", "prefetch"), compiled="pearl._native"
            ),
        }
        self.rollout_learners = {
            "torch": TORCH_ROLLOUT_LEARNER,
            "native": RolloutLearnerImplementation(
                "pearl.backends.cpu.rollout_learner", "NativeRolloutLearner", ("threads",)
            ),
        }
        self.replay_managers = {
            "native": ReplayImplementation("pearl.backends.cpu.replay", "NativeReplayManager", ("workers",)),
            "reference": ReplayImplementation("pearl.replay.reference", "ReferenceReplayManager"),
        }

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """'cpu' or nothing."""
        if selector not in ("", "cpu"):
            raise ConfigurationError(f"The cpu backend has one selector, 'cpu' (or nothing); found {selector!r}.")

    def discover(self, search: Discovery) -> Discovered:
        """The host, and with `measure` its memory as a connection to itself."""
        from pearl.backends.cpu import device

        info = device.describe_cpu()
        search.report(
            f"CPU: {info.model}, {info.logical_cores} logical and {info.physical_cores} physical cores usable"
        )
        if not search.measure:
            return Discovered([device.cpu_device(info)])
        search.report("Measuring the memory bandwidth of the CPU")
        bandwidth = round(device.measure_memory_bandwidth(info), 2)
        latency = device.host_memory_latency_us(info)
        host = device.cpu_device(info, memory_bandwidth_gbps=bandwidth)
        return Discovered([host], [Connection(host.name, host.name, latency, bandwidth)])

    def hardware(self, device: Device) -> str:
        """Facts read from the machine: editing the watts of a CPU must not invalidate its measurements."""
        from pearl.backends.cpu.device import describe_cpu

        return describe_cpu().identity()

    def host_rank(self, device: Device) -> int:
        """The CPU is the best host."""
        return 0

    def on_host_cores(self, device: Device) -> bool:
        """The CPU is the host."""
        return True

    def power_meter(self, device: Device) -> PowerMeter | None:
        """RAPL, of all packages of this machine together."""
        from pearl.backends.cpu.power import cpu_meter

        return cpu_meter()

    def replay(self, device: Device) -> Factory:
        """The sum tree in C++."""
        return Factory("pearl.replay", "make_replay_manager")

    def advantages(self, device: Device) -> Factory:
        """The scan in C++."""
        return Factory("pearl.backends.cpu.gae", "NativeGae")

    def keeps_storage(self, device: Device, *, with_learner: bool) -> bool:
        """Its memory is the host's."""
        return True

    def replay_workers(self, device: Device, batch_size: int, most: int) -> Sequence[int]:
        """Powers of two, for batches that the tree shares out among its threads."""
        return powers_of_two(most) if batch_size >= _SHARED_BATCH else (1,)

    def learner_parameters(
        self, device: Device, *, most_threads: int, most_sub_batches: int
    ) -> Sequence[LearnerParameters]:
        """Powers of two as numbers of threads."""
        return [LearnerParameters(threads) for threads in powers_of_two(most_threads)]


BACKEND = CpuBackend()
