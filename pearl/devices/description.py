"""Devices and connections: the rows of the device CSV and of the connection CSV."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from dataclasses import MISSING, dataclass, fields
from typing import Literal, TypeAlias, get_args

from pearl.errors import ConfigurationError

DeviceKind: TypeAlias = Literal["cpu", "gpu", "fpga"]

KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)

NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
NAME_RULE = "1 to 64 letters, digits, or any of _ . : -"
NODE_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,255}")
NODE_RULE = "a name or an address, of at most 255 letters, digits, or any of _ . : -"
SELECTOR_LENGTH = 256
FINGERPRINT_PATTERN = re.compile(r"[0-9a-f]{16}")
FINGERPRINT_RULE = "a fingerprint, 16 of the digits 0-9 and a-f,"


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used here (`ok`), and if not, the reason."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Device:
    """One row of the device CSV; a value that is not known is None.

    `shares_with` names another device on the same silicon: work on one slows the other down. `calibration` is the
    fingerprint of the hardware that the row describes: if this machine's is another, the device is `absent`. `node`
    names the node of a cluster that has the device, which is then a CPU for Actors and Learners; empty for the devices
    of this machine. `speed`, of a device with a node, is how fast one of its cores is compared with one of the host.
    Frequencies are in MHz, memory in GB (10^9 bytes), bandwidth in gigabytes per second, `sram_kb` in KB (10^3
    bytes), power in watts. `cores` are logical cores of a CPU, multiprocessors of a GPU.
    """

    name: str
    kind: DeviceKind
    backend: str
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
    calibration: str = ""
    node: str = ""
    speed: float | None = None

    def __post_init__(self) -> None:
        from pearl.backends import csv_names, hosts_actors

        if not NAME_PATTERN.fullmatch(self.name):
            raise ConfigurationError(f"A device's name must be {NAME_RULE}; found {self.name!r}.")
        for column, accepted in (("kind", KINDS), ("backend", csv_names())):
            value = getattr(self, column)
            if value not in accepted:
                raise ConfigurationError(
                    f"Device {self.name!r}: {column} must be one of {', '.join(accepted)}; found {value!r}."
                )
        if self.backend not in csv_names(self.kind):
            raise ConfigurationError(
                f"Device {self.name!r}: a {self.kind} is driven by {' or '.join(csv_names(self.kind))}; "
                f"found backend {self.backend!r}."
            )
        check_selector(self.kind, self.backend, self.selector)
        if self.shares_with == self.name or not (self.shares_with == "" or NAME_PATTERN.fullmatch(self.shares_with)):
            raise ConfigurationError(
                f"Device {self.name!r}: shares_with must name another device; found {self.shares_with!r}."
            )
        if self.calibration:
            check_calibration(self.kind, self.backend, self.calibration)
        if self.node and not (NODE_PATTERN.fullmatch(self.node) and hosts_actors(self)):
            raise ConfigurationError(
                f"Device {self.name!r}: node must be {NODE_RULE}, of a device that can run Actors, as nothing else "
                f"runs on other nodes; found {self.node!r}, a {self.kind}."
            )
        if self.speed is not None and not self.node:
            raise ConfigurationError(
                f"Device {self.name!r}: speed is that of a node, compared with this machine; found {self.speed!r} "
                "without a node."
            )
        for column in QUANTITIES:
            if (value := getattr(self, column)) is not None:
                _check_quantity(f"Device {self.name!r}: {column}", value, may_be_zero=column in MAY_BE_ZERO)

    def availability(self) -> Availability:
        """Whether the device can be used on this machine; null, modelled and absent devices count as usable.

        For a cuda device this imports torch, for a sycl device it loads the SYCL runtime.
        """
        from pearl.backends import backend_of

        return Availability(True) if self.absent else backend_of(self).availability(self)

    @functools.cached_property
    def absent(self) -> bool:
        """Whether the row is of another machine's hardware, on which nothing runs or is measured here."""
        return bool(self.calibration) and self.calibration != _fingerprint_here(self)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the hardware, its driver, or its row of the CSV.

        Names are left out: a renamed device keeps its measurements. An absent device has the one that its row states.
        """
        return self.calibration or _fingerprint_here(self)


def _fingerprint_here(device: Device) -> str:
    """The fingerprint of this machine's hardware that the row selects."""
    left_out = ("name", "shares_with", "calibration", "node", "speed")
    facts: dict[str, object] = {f.name: getattr(device, f.name) for f in fields(device) if f.name not in left_out}
    from pearl.backends import backend_of

    if (hardware := backend_of(device).hardware(device)) is not None:
        facts = {"kind": device.kind, "backend": device.backend, "hardware": hardware}
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


DEVICE_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Device))
_TEXTS = ("shares_with", "calibration", "node")
QUANTITIES: tuple[str, ...] = tuple(name for name in DEVICE_COLUMNS[4:] if name not in _TEXTS)
MAY_BE_ZERO: frozenset[str] = frozenset({"dsp", "sram_kb", "luts", "idle_watts"})


@dataclass(frozen=True)
class Connection:
    """One row of the connection CSV: `bandwidth_gbps` in gigabytes per second; source may equal target.

    `active_watts` is the power of the link, or of the device's own memory, while it is used; None: not stated.
    """

    source: str
    target: str
    latency_us: float
    bandwidth_gbps: float
    active_watts: float | None = None

    def __post_init__(self) -> None:
        link = f"Connection {self.source} -> {self.target}"
        _check_quantity(f"{link}: latency_us", self.latency_us, may_be_zero=True)
        _check_quantity(f"{link}: bandwidth_gbps", self.bandwidth_gbps, may_be_zero=False)
        if self.active_watts is not None:
            _check_quantity(f"{link}: active_watts", self.active_watts, may_be_zero=True)


CONNECTION_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Connection))
NEEDED_CONNECTION_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Connection) if f.default is MISSING)


def _check_quantity(name: str, value: float, *, may_be_zero: bool) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        wanted = "of at least 0" if may_be_zero else "above 0"
        raise ConfigurationError(f"{name} must be a finite number {wanted}; found {value!r}.")


def check_selector(kind: DeviceKind, backend: str, selector: str) -> None:
    """Raise ConfigurationError unless `selector` is valid for a device of `kind` with this `backend`."""
    from pearl.backends import backend_for, csv_names

    if len(selector) > SELECTOR_LENGTH or not selector.isprintable():
        raise ConfigurationError(
            f"A selector must be printable text of at most {SELECTOR_LENGTH} characters; found {selector[:80]!r}."
        )
    if backend in csv_names(kind):
        backend_for(kind, backend).check_selector(kind, selector)


def check_calibration(kind: DeviceKind, backend: str, calibration: str) -> None:
    """Raise ConfigurationError unless a device of `kind` with this `backend` may state this `calibration`."""
    from pearl.backends import backend_for

    if not FINGERPRINT_PATTERN.fullmatch(calibration):
        raise ConfigurationError(
            f"A calibration must be {FINGERPRINT_RULE} of a device that was measured; found {calibration!r:.80}."
        )
    if not backend_for(kind, backend).is_here:
        raise ConfigurationError(
            f"A device of backend {backend} is never measured: leave its calibration empty; found {calibration!r}."
        )
