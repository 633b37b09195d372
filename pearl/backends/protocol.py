"""The interface of backends: everything that depends on the kind of device.

The composer, the generated programs and `pearl devices` call these methods and never test a device's name or kind. A
new backend derives from `Backend`, overrides what differs from the defaults, and gets a line in `pearl.backends.TABLE`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pearl.devices.description import Availability, Connection, Device, DeviceKind
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from pearl.backends.torch_support import TorchSupport
    from pearl.devices.power import PowerMeter
    from pearl.learner.protocol import Learner, RolloutLearner
    from pearl.replay.protocol import ReplayManager
    from pearl.rollout.gae import AdvantageEstimator
    from pearl.spec import ReplaySpec, TransitionSpec

HostCores: TypeAlias = Literal["none", "threads", "all"]


@dataclass(frozen=True)
class _Imported:
    """The class or function `name` of `module`."""

    module: str
    name: str

    def load(self) -> Any:
        """The class or function."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True)
class Factory(_Imported):
    """How a program makes a primitive: it imports `name` from `module` and adds `arguments` to its call.

    A Replay Manager is made by `name(spec, seed=..., **arguments)`, a Data Storage by
    `name(transition, capacity, device, **arguments)`, where `device` is `Backend.device_string`, an estimator of
    advantages by `name(gamma, gae_lambda, **arguments)`.
    """

    arguments: Mapping[str, str | int] = field(default_factory=dict)

    def with_workers(self, workers: int) -> Factory:
        """The same Replay Manager with this number of threads."""
        return self if workers == 1 else dataclasses.replace(self, arguments={**self.arguments, "workers": workers})

    def make_replay(self, spec: ReplaySpec, seed: int) -> ReplayManager:
        """The Replay Manager of the whole `spec`."""
        made: ReplayManager = self.load()(spec, seed=seed, **self.arguments)
        return made

    def make_storage(self, transition: TransitionSpec, capacity: int, device: str) -> Any:
        """The empty Data Storage."""
        return self.load()(transition, capacity, device, **self.arguments)

    def make_advantages(self, gamma: float, gae_lambda: float) -> AdvantageEstimator:
        """The estimator of advantages."""
        made: AdvantageEstimator = self.load()(gamma, gae_lambda, **self.arguments)
        return made


@dataclass(frozen=True)
class ReplayImplementation(_Imported):
    """One implementation of the Replay Manager: the class `name` of `module`.

    It is made with the capacity, `fanout`, `seed`, the options of a ReplaySpec, and `arguments`, which are some of
    "workers" and "device".
    """

    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class LearnerImplementation(_Imported):
    """One implementation of the Learner: the class `name` of `module`, made with the trainer and `arguments`.

    `arguments` are some of "device", "threads", "sub_batches", "unroll" and "prefetch"; a class that takes "prefetch"
    has the property `loops_natively`: if False, nothing is prefetched. `compiled` is the module of the compiled kernels
    that it runs, if any. `spins` says that its threads busy-wait for each other by default (as OpenMP's do). The class
    may have a static method `supports(trainer)`; without one it trains any trainer. With a static method
    `least_step_us(trainer)` it is not measured where another one is far faster. A Learner with `own_memory` takes the
    trainer's tensors from the host into memory of its own.
    """

    arguments: tuple[str, ...] = ()
    compiled: str = ""
    spins: bool = False
    own_memory: bool = False

    def places(self, device: Device, backend: Backend) -> tuple[str, str]:
        """Torch's device of the trainer's tensors, and the Learner's argument `device`."""
        if self.own_memory:
            return "cpu", backend.device_string(device)
        return backend.torch_device(device), backend.torch_device(device)

    def supports(self, trainer: object) -> str | None:
        """None if it can train `trainer`; else one line that says what it does not support."""
        supports = getattr(self.load(), "supports", None)
        reason: str | None = None if supports is None else supports(trainer)
        return reason

    def least_step_us(self, trainer: object) -> float:
        """Microseconds that a step on a CPU takes at least; 0 where only a measurement tells."""
        return _least_step_us(self, trainer)

    def make(
        self, trainer: object, *, device: str = "cpu", threads: int = 1, sub_batches: int = 1, prefetch: bool = False
    ) -> Learner:
        """A Learner of `trainer` on `device`, a `Backend.device_string`; TrainerError if it cannot train `trainer`."""
        given = {"device": device, "threads": threads, "sub_batches": sub_batches, "prefetch": prefetch}
        learner: Learner = self.load()(trainer, **{name: given[name] for name in self.arguments if name in given})
        return learner

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that determine its speed: measurements are valid until one of them changes."""
        package = Path(__file__).resolve().parent.parent
        files = {file for folder in ("learner", "algorithms") for file in (package / folder).glob("*.py")}
        own = importlib.util.find_spec(self.module)
        if own is not None and own.origin is not None:
            files.add(Path(own.origin))
        return (*sorted(files), *((compiled_kernels(self.compiled),) if self.compiled else ()))


@dataclass(frozen=True)
class RolloutLearnerImplementation(_Imported):
    """One implementation of the Learner of rollouts: the class `name` of `module`.

    It is made with the trainer, `epochs`, `batch_size`, and `arguments`, which are some of "device" and "threads". The
    class may have a static method `supports(trainer)`; without one it trains any trainer that learns from rollouts.
    With a static method `least_step_us(trainer)` it is not measured where another one is far faster.
    """

    arguments: tuple[str, ...] = ()
    spins: bool = False

    def supports(self, trainer: object) -> str | None:
        """None if it can train `trainer`; else one line that says what it does not support."""
        supports = getattr(self.load(), "supports", None)
        reason: str | None = None if supports is None else supports(trainer)
        return reason

    def least_step_us(self, trainer: object) -> float:
        """Microseconds that a step on one minibatch on a CPU takes at least; 0 where only a measurement tells."""
        return _least_step_us(self, trainer)

    def make(self, trainer: object, *, epochs: int, batch_size: int, threads: int, device: str) -> RolloutLearner:
        """A Learner of `trainer`; TrainerError if it cannot train it."""
        given = {"threads": threads, "device": device}
        learner: RolloutLearner = self.load()(
            trainer, epochs=epochs, batch_size=batch_size, **{name: given[name] for name in self.arguments}
        )
        return learner


def _least_step_us(implementation: _Imported, trainer: object) -> float:
    bound = getattr(implementation.load(), "least_step_us", None)
    return 0.0 if bound is None else float(bound(trainer))


def compiled_kernels(module: str = "pearl._native") -> Path:
    """The file of PEARL's compiled kernels in `module`, which is not loaded."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ConfigurationError(f"The kernels {module} are not built: reinstall PEARL where their runtime is.")
    return Path(found.origin)


@dataclass(frozen=True)
class LearnerParameters:
    """One combination of a Learner's parameters to measure."""

    threads: int = 1
    sub_batches: int = 1


@dataclass(frozen=True)
class NoProgram:
    """Why no program can run on a device: "it is `reason`"; `remedy` names the rows to remove from the device CSV."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Discovery:
    """A search for devices: how to search, and the host and its memory as far as they are known.

    `measure` times links and memory; `report` receives progress messages. `own_silicon` leaves out devices that are the
    host itself.
    """

    measure: bool
    report: Callable[[str], None]
    own_silicon: bool = False
    host: Device | None = None
    memory: Sequence[Connection] = ()


@dataclass(frozen=True)
class Discovered:
    """Devices of this machine and their connections."""

    devices: Sequence[Device] = ()
    connections: Sequence[Connection] = ()


class Backend:
    """Drives one kind of devices. The defaults are those of a backend without any primitive.

    `name` is its key in `pearl.backends.TABLE`. In the device CSV, `csv_name` is the column `backend` of its devices,
    and `kinds` are the values of their column `kind`. Two backends may share a `csv_name` for different kinds.
    """

    name: str
    csv_name: str
    kinds: tuple[DeviceKind, ...]

    is_here: bool = True  # False: its devices are never hardware of this machine
    host_cores: HostCores = "none"
    """The host's cores that a Learner takes: none, one for each thread, or all, including those of the Actors."""
    usual_memory_gbps: Mapping[DeviceKind, float] = MappingProxyType({"cpu": 20.0, "gpu": 300.0, "fpga": 15.0})
    """Default GB/s of a device's own memory, by its kind."""
    kernels: str = "pearl._native"
    """The module of the kernels that run on its devices: measurements are valid until it changes."""
    times_parts_apart: bool = False
    """Whether its fused loop runs asynchronously, so that the host must wait after each part to time it."""
    learners: Mapping[str, LearnerImplementation] = MappingProxyType({})
    """The Learners that run on its devices, by the name of the implementation."""
    rollout_learners: Mapping[str, RolloutLearnerImplementation] = MappingProxyType({})
    """The same for Learners that train on rollouts."""
    replay_managers: Mapping[str, ReplayImplementation] = MappingProxyType({})
    """The Replay Managers that `pearl.replay.make_replay_manager` can make, by the name of the implementation."""
    factory_names: tuple[str, ...] = ()
    """The names of all its factories, of whatever primitive; no trainer class may have these names."""

    # --- devices ----------------------------------------------------------------------------------------------------

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """Raise ConfigurationError unless `selector` is valid for a device of `kind`."""

    def discover(self, search: Discovery) -> Discovered:
        """The devices of this machine. One that fails is reported and left out."""
        return Discovered()

    def availability(self, device: Device) -> Availability:
        """Whether the device can be used here, and if not why."""
        return Availability(True)

    def candidates(self) -> Mapping[str, Device]:
        """Devices that PEARL could drive but that may be absent here, by their names in `pearl devices`."""
        return {}

    def hardware(self, device: Device) -> str | None:
        """Facts that measurements on the device depend on; None if these are the facts in its row."""
        return None

    def host_rank(self, device: Device) -> int | None:
        """The device's rank as host of Actors and the Host Runtime, 0 is the best; None if it cannot host them."""
        return 1 if device.kind == "cpu" else None

    def on_host_cores(self, device: Device) -> bool:
        """Whether the device uses the cores of this machine's CPU, which this process may have to share."""
        return False

    def emulated(self, device: Device) -> bool:
        """Whether the device is an emulator: programs work there, but their times mean nothing."""
        return False

    def power_meter(self, device: Device) -> PowerMeter | None:
        """A meter of the energy of the device's silicon; None if it has no counter.

        Raises DeviceError if there is a counter that cannot be read; it says how to get the right.
        """
        return None

    def takes_primitives(self, device: Device) -> bool:
        """Whether the device can always take a primitive, so that its power must be stated in advance."""
        return device.kind != "fpga"

    # --- how its row of the matrix is filled ------------------------------------------------------------------------

    def estimator(self, device: Device) -> str | None:
        """The composer's estimator for its row of the matrix; None: the primitives are measured."""
        return None

    def estimator_parameters(self, device: Device) -> str:
        """The parameters that replace the estimator's defaults, as `key=value;...`."""
        return ""

    def messages_us(self, device: Device) -> float | None:
        """Microseconds of a host's messages in one iteration of setting 1; None: they are measured."""
        return None

    def talks_directly(self, device: Device, other: Device) -> bool:
        """Whether programs send messages from `device` to the device `other` without the host between them."""
        return False

    @property
    def needs_messages(self) -> bool:
        """Whether messages between its devices and the host take time."""
        return True

    def is_failure(self, error: Exception) -> bool:
        """Whether `error`, which is not a PearlError, means that the device failed and not the user's trainer."""
        return False

    # --- where programs run -----------------------------------------------------------------------------------------

    def no_program(self, device: Device) -> NoProgram | None:
        """Why no program can run on the device; None if programs can."""
        return None

    def note(self, device: Device) -> str:
        """A note for the user on programs that run on the device; "" if there is none."""
        return ""

    def torch_device(self, device: Device) -> str:
        """Torch's name of the device that holds the trainer's tensors."""
        return "cpu"

    def device_string(self, device: Device) -> str:
        """The backend's name of the device: for a Data Storage, and for a Learner with `own_memory`."""
        return self.torch_device(device)

    def torch_support(self, device_type: str) -> TorchSupport | None:
        """Support for torch on its devices, if they are of this type (`torch.device.type`); else None."""
        return None

    def policy_device(self, device: Device) -> str | None:
        """Torch's name of the device if a policy server on it may be faster than Actors on the host; else None."""
        return None

    # --- primitives -------------------------------------------------------------------------------------------------

    def replay(self, device: Device) -> Factory | None:
        """How its Replay Manager is made; None if it has none."""
        return None

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> str | None:
        """Why the device cannot take the Replay Manager of `spec`; None if it can."""
        return None if self.replay(device) else f"no Replay Manager for {self.csv_name} in this version"

    def storage(self, device: Device) -> Factory | None:
        """How a Data Storage in the device's own memory is made; None if the host's is used."""
        return None

    def reads_host_memory(self, device: Device) -> bool:
        """Whether a Data Storage too large for the device's memory is made in the host's, where the device reads it."""
        return False

    def keeps_storage(self, device: Device, *, with_learner: bool) -> bool:
        """Whether the device can keep the Data Storage, with or without the Learner on the same device."""
        return with_learner and self.storage(device) is not None

    def replay_workers(self, device: Device, batch_size: int, most: int) -> Sequence[int]:
        """Thread counts to try for a Replay Manager (the paper's W), at most `most`, the smallest first."""
        return (1,)

    def advantages(self, device: Device) -> Factory | None:
        """How its estimator of advantages is made, for on-policy training; None if it has none."""
        return None

    def learner_parameters(
        self, device: Device, *, most_threads: int, most_sub_batches: int
    ) -> Sequence[LearnerParameters]:
        """The combinations of a Learner's parameters to measure, the smallest first.

        `most_threads` matters only if `host_cores` is "threads".
        """
        return (LearnerParameters(),)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
