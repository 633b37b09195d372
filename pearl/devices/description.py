"""What a device and a connection are: the rows of the device CSV and of the connection CSV."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from pearl.errors import ConfigurationError

DeviceKind: TypeAlias = Literal["cpu", "gpu", "fpga"]
Backend: TypeAlias = Literal["cpu", "cuda", "sycl", "null", "model"]

KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Which backends drive which kind. The null backend pretends to be any of them, and the model backend stands for one
# that is not here: equations say what it would take.
BACKENDS_OF_KIND: dict[DeviceKind, tuple[Backend, ...]] = {
    "cpu": ("cpu", "sycl", "null", "model"),
    "gpu": ("cuda", "sycl", "null", "model"),
    "fpga": ("sycl", "null", "model"),
}
NOT_HERE: tuple[Backend, ...] = ("null", "model")  # backends of devices on which no program can run

NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
NAME_RULE = "1 to 64 letters, digits, or any of _ . : -"
SELECTOR_LENGTH = 256


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used here, and if not (`ok` is False) why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Device:
    """One row of the device CSV; a value that is not known is None.

    `shares_with` names another device that is the same piece of silicon: what runs on one slows the other down.
    Frequencies are in MHz, memory in GB (10^9 bytes), bandwidth in gigabytes per second, `sram_kb` in KB (10^3
    bytes), power in watts. `cores` are logical cores of a CPU, multiprocessors of a GPU.
    """

    name: str
    kind: DeviceKind
    backend: Backend
    selector: str = ""
    cores: int | None = None
    clock_mhz: float | None = None
    memory_gb: float | None = None
    memory_bandwidth_gbps: float | None = None
    dsp: int | None = None
    sram_kb: float | None = None
    luts: int | None = None
    idle_watts: float | None = None
    active_watts: float | None = None
    shares_with: str = ""

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise ConfigurationError(f"A device's name must be {NAME_RULE}; found {self.name!r}.")
        for column, accepted in (("kind", KINDS), ("backend", BACKENDS)):
            value = getattr(self, column)
            if value not in accepted:
                raise ConfigurationError(
                    f"Device {self.name!r}: {column} must be one of {', '.join(accepted)}; found {value!r}."
                )
        if self.backend not in BACKENDS_OF_KIND[self.kind]:
            raise ConfigurationError(
                f"Device {self.name!r}: a {self.kind} is driven by {' or '.join(BACKENDS_OF_KIND[self.kind])}; "
                f"found backend {self.backend!r}."
            )
        check_selector(self.kind, self.backend, self.selector)
        if self.shares_with == self.name or not (self.shares_with == "" or NAME_PATTERN.fullmatch(self.shares_with)):
            raise ConfigurationError(
                f"Device {self.name!r}: shares_with must name another device; found {self.shares_with!r}."
            )
        for column in QUANTITIES:
            value = getattr(self, column)
            if value is None:
                continue
            zero_allowed = column in MAY_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
                raise ConfigurationError(
                    f"Device {self.name!r}: {column} must be a finite number "
                    f"{'of at least 0' if zero_allowed else 'above 0'}; found {value!r}."
                )

    def availability(self) -> Availability:
        """Say whether the device can be used on this machine; one that is not here by its own row counts as usable.

        To find out, a cuda device imports torch and a sycl device loads the SYCL runtime.
        """
        if self.backend in NOT_HERE:
            return Availability(True)
        if self.backend == "sycl":
            from pearl.devices.sycl import sycl_availability

            return sycl_availability(sycl_filter(self.selector, self.kind))
        if self.backend == "cuda":
            from pearl.devices.cuda import cuda_availability

            return cuda_availability(cuda_index(self.selector))
        return Availability(True)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the hardware, its driver, or what the CSV declares about it.

        Names are left out: a renamed device keeps its measurements.
        """
        named = ("name", "shares_with")
        facts: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in named}
        if self.backend == "cpu":
            from pearl.devices.cpu import describe_cpu

            # Only what the machine says: editing the watts of a CPU must not throw its measurements away.
            facts = {"kind": self.kind, "backend": self.backend, "hardware": describe_cpu().identity()}
        elif self.backend == "cuda":
            from pearl.devices.cuda import cuda_identity

            index = cuda_index(self.selector)
            facts = {"kind": self.kind, "backend": self.backend, "hardware": cuda_identity(index)}
        elif self.backend == "sycl" and self.kind != "fpga":  # what the CSV says of an FPGA is what is modelled
            from pearl.devices.sycl import sycl_identity

            hardware = sycl_identity(sycl_filter(self.selector, self.kind))
            facts = {"kind": self.kind, "backend": self.backend, "hardware": hardware}
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


DEVICE_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Device))
QUANTITIES: tuple[str, ...] = tuple(name for name in DEVICE_COLUMNS[4:] if name != "shares_with")
MAY_BE_ZERO: frozenset[str] = frozenset({"dsp", "sram_kb", "luts", "idle_watts"})


@dataclass(frozen=True)
class Connection:
    """One row of the connection CSV: `bandwidth_gbps` in gigabytes per second; source may equal target."""

    source: str
    target: str
    latency_us: float
    bandwidth_gbps: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_us) and self.latency_us >= 0):
            raise ConfigurationError(
                f"Connection {self.source} -> {self.target}: latency_us must be a finite number of at least 0; "
                f"found {self.latency_us!r}."
            )
        if not (math.isfinite(self.bandwidth_gbps) and self.bandwidth_gbps > 0):
            raise ConfigurationError(
                f"Connection {self.source} -> {self.target}: bandwidth_gbps must be a finite number above 0; "
                f"found {self.bandwidth_gbps!r}."
            )


CONNECTION_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Connection))


def cuda_index(selector: str) -> int:
    """The CUDA device index a selector names: `cuda:1`, `1`, or nothing for 0."""
    match = re.fullmatch(r"(?:cuda:)?([0-9]{1,3})", selector)
    if match:
        return int(match[1])
    if selector in ("", "cuda"):
        return 0
    raise ConfigurationError(f"A cuda selector must be an index such as 'cuda:0'; found {selector!r}.")


# dpctl's filter strings, and what one would write without knowing them.
_SYCL_SELECTOR = re.compile(r"(?:(opencl|level_zero|sycl):)?(cpu|gpu|accelerator|fpga)(?::([0-9]{1,3}))?")
_SYCL_TYPES: dict[str, tuple[DeviceKind, str]] = {  # -> kind, and the backend and type of dpctl's filter
    "cpu": ("cpu", "opencl:cpu"),
    "gpu": ("gpu", "level_zero:gpu"),
    "accelerator": ("fpga", "opencl:accelerator"),
    "fpga": ("fpga", "opencl:accelerator"),
}
EMULATOR_SELECTOR = "fpga_emu"


def sycl_filter(selector: str, kind: DeviceKind | None = None) -> str:
    """The filter string of dpctl that `selector` means, or `fpga_emu`, the FPGA emulator wherever it is listed.

    `opencl:cpu:0`, `level_zero:gpu:1` and `opencl:accelerator:0` are themselves; `cpu`, `sycl:cpu` and `sycl:cpu:0` are
    the first, and so for gpu and fpga; nothing is the first device of `kind`. ConfigurationError otherwise, and for a
    device of another kind.
    """
    if selector in (EMULATOR_SELECTOR, f"sycl:{EMULATOR_SELECTOR}") and kind in (None, "fpga"):
        return EMULATOR_SELECTOR
    match = _SYCL_SELECTOR.fullmatch(selector or kind or "")
    if match:
        of_kind, target = _SYCL_TYPES[match[2]]
        if kind in (None, of_kind):
            backend = target.partition(":")[0] if match[1] in (None, "sycl") else match[1]
            return f"{backend}:{target.partition(':')[2]}:{int(match[3] or 0)}"
    of = f" of kind {kind}" if kind else ""
    raise ConfigurationError(
        f"A sycl selector{of} must be one of dpctl's filter strings, such as 'opencl:cpu:0', 'level_zero:gpu:0' or "
        f"'opencl:accelerator:0', or '{EMULATOR_SELECTOR}'; found {selector!r}."
    )


def check_selector(kind: DeviceKind, backend: Backend, selector: str) -> None:
    """Raise ConfigurationError unless `selector` is one that `backend` understands for a device of `kind`."""
    if len(selector) > SELECTOR_LENGTH or not selector.isprintable():
        raise ConfigurationError(
            f"A selector must be printable text of at most {SELECTOR_LENGTH} characters; found {selector[:80]!r}."
        )
    if backend == "cpu" and selector not in ("", "cpu"):
        raise ConfigurationError(f"The cpu backend has one selector, 'cpu' (or nothing); found {selector!r}.")
    if backend == "cuda":
        cuda_index(selector)
    if backend == "sycl":
        sycl_filter(selector, kind)
    if backend == "null":
        from pearl.devices.null import NullTimes

        NullTimes.parse(selector)
    if backend == "model":
        from pearl.devices.modelled import model_parameters

        model_parameters(kind, selector)
