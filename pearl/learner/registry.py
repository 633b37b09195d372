"""The implementations of the Learner: what each is called, where it runs, and whether it can train a trainer.

A new one is a file with its class and an entry here. The classes are loaded when they are asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.devices.description import Device, DeviceKind
from pearl.errors import ConfigurationError
from pearl.learner.protocol import Learner

AUTO = "auto"  # no name of an implementation: the fastest that can train the trainer


@dataclass(frozen=True)
class LearnerImplementation:
    """One entry: the class `name` of `module`, made with the trainer and those of the keywords in `arguments`.

    `backends` and `kinds` are those of the devices that it runs on. `arguments` are some of "device", "threads",
    "sub_batches" and "prefetch". `compiled` is the module of the compiled kernels that it runs, if any. The class may
    have a static method `supports(trainer)`; without one it trains any trainer.
    """

    module: str
    name: str
    backends: tuple[str, ...]
    arguments: tuple[str, ...]
    compiled: str = ""
    kinds: tuple[DeviceKind, ...] = ("cpu", "gpu")

    def runs_on(self, device: Device) -> bool:
        """Whether devices like this one are among those that it runs on."""
        return device.backend in self.backends and device.kind in self.kinds

    def load(self) -> Any:
        """The class."""
        return getattr(importlib.import_module(self.module), self.name)

    def supports(self, trainer: object) -> str | None:
        """None if it can train `trainer`; else one line that names what it cannot do."""
        supports = getattr(self.load(), "supports", None)
        reason: str | None = None if supports is None else supports(trainer)
        return reason

    def make(
        self, trainer: object, *, device: str = "cpu", threads: int = 1, sub_batches: int = 1, prefetch: bool = False
    ) -> Learner:
        """A Learner of `trainer` on `device`; TrainerError if it cannot train `trainer`.

        `device` is torch's name of it, for SYCL devices their selector.
        """
        given = {"device": device, "threads": threads, "sub_batches": sub_batches, "prefetch": prefetch}
        learner: Learner = self.load()(trainer, **{name: given[name] for name in self.arguments})
        return learner

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that decide how fast it is: measurements hold as long as they stay as they are."""
        learners = Path(__file__).resolve().parent
        files = [*sorted(learners.glob("*.py")), *sorted((learners.parent / "algorithms").glob("*.py"))]
        return (*files, compiled_kernels(self.compiled)) if self.compiled else tuple(files)


LEARNERS: dict[str, LearnerImplementation] = {
    "torch": LearnerImplementation(
        "pearl.learner.torch_learner", "TorchLearner", ("cpu", "cuda"), ("device", "threads", "sub_batches")
    ),
    "native": LearnerImplementation(
        "pearl.learner.native_learner", "NativeLearner", ("cpu",), ("threads", "prefetch"), compiled="pearl._native"
    ),
    "sycl": LearnerImplementation(
        "pearl.learner.sycl_learner", "SyclLearner", ("sycl",), ("device",), compiled="pearl._sycl"
    ),
    "fpga": LearnerImplementation(
        "pearl.learner.fpga_learner",
        "FpgaLearner",
        ("sycl",),
        ("device", "sub_batches"),
        compiled="pearl._sycl",
        kinds=("fpga",),
    ),
}


def compiled_kernels(module: str = "pearl._native") -> Path:
    """The file of PEARL's compiled kernels for the CPU, or of those in another `module`, which is not loaded."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ConfigurationError(f"The kernels {module} are not built: install PEARL anew where their runtime is.")
    return Path(found.origin)


def check_implementation(name: object, *, auto: bool = False) -> str:
    """Return `name`, or raise ConfigurationError unless it is one of `LEARNERS` (or, with `auto`, "auto")."""
    known = [*([AUTO] if auto else []), *LEARNERS]
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        advice = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"The Learner's implementation must be one of {', '.join(map(repr, known))}; found {name!r}.{advice}"
        )
    return str(name)
