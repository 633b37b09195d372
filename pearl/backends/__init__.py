"""Backends: everything that depends on the kind of device, one folder each.

A new backend is a folder (or a module) with a `BACKEND`, and a line in `TABLE`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pearl.devices.description import Device, DeviceKind
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from pearl.backends.protocol import Backend, LearnerImplementation
    from pearl.backends.torch_support import TorchSupport

# Name -> the module with its BACKEND, loaded at first use. Discovery follows this order.
TABLE: dict[str, str] = {
    "cpu": "pearl.backends.cpu",
    "cuda": "pearl.backends.cuda",
    "sycl": "pearl.backends.sycl",
    "fpga": "pearl.backends.fpga",
    "null": "pearl.backends.null",
    "model": "pearl.backends.model",
}

AUTO = "auto"  # not an implementation: selects the fastest Learner that can train the trainer


@functools.cache
def _loaded(module: str) -> Backend:
    backend: Backend = importlib.import_module(module).BACKEND
    return backend


def backends() -> tuple[Backend, ...]:
    """All backends, in the order of the table."""
    return tuple(_loaded(module) for module in TABLE.values())


def csv_names(kind: DeviceKind | None = None) -> tuple[str, ...]:
    """The valid values of the device CSV's column `backend`, for devices of `kind` if given."""
    return tuple(dict.fromkeys(b.csv_name for b in backends() if kind is None or kind in b.kinds))


def backend_for(kind: DeviceKind, csv_name: str) -> Backend:
    """The backend of a row of the device CSV with this kind and backend; ConfigurationError if there is none."""
    for backend in backends():
        if backend.csv_name == csv_name and kind in backend.kinds:
            return backend
    raise ConfigurationError(f"a {kind} is driven by {' or '.join(csv_names(kind))}; found backend {csv_name!r}.")


def backend_of(device: Device) -> Backend:
    """The backend that drives the device."""
    return backend_for(device.kind, device.backend)


def hosts_actors(device: Device) -> bool:
    """Whether Actors can run on the device."""
    return backend_of(device).host_rank(device) is not None


def support_for_torch(device_type: str) -> TorchSupport | None:
    """Support that a backend adds to torch on devices of this type (`torch.device.type`); None if no backend does."""
    found = (backend.torch_support(device_type) for backend in backends())
    return next((support for support in found if support is not None), None)


def learners() -> Mapping[str, LearnerImplementation]:
    """Every implementation of the Learner, by its name."""
    return {name: found for backend in backends() for name, found in backend.learners.items()}


def runs_on(implementation: str, device: Device) -> bool:
    """Whether the Learner called `implementation` runs on devices like this one."""
    return implementation in backend_of(device).learners


def devices_of(implementation: str) -> str:
    """The devices on which the Learner called `implementation` runs, in words."""
    found = [backend for backend in backends() if implementation in backend.learners]
    names = dict.fromkeys(backend.csv_name for backend in found)
    kinds = dict.fromkeys(kind for backend in found for kind in backend.kinds)
    only = "" if "cpu" in kinds else f" of the kind {' or '.join(kinds)}"
    return f"{' and '.join(names)} devices{only}"


def check_implementation(name: object, *, auto: bool = False) -> str:
    """Return `name`, or raise ConfigurationError unless it is one of `learners()` (or, with `auto`, "auto")."""
    known = [*([AUTO] if auto else []), *learners()]
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        advice = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"The Learner's implementation must be one of {', '.join(map(repr, known))}; found {name!r}.{advice}"
        )
    return str(name)
