"""Devices: their descriptions, discovery on this machine, and the CSV files that describe them.

This package has values only; code for each kind of device is in `pearl.backends`, whose names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pearl.devices.description import Availability, Connection, Device

if TYPE_CHECKING:
    from pearl.backends.cpu.device import CpuInfo, describe_cpu
    from pearl.backends.null.device import NullTimes
    from pearl.devices.discovery import discover, write_csv

__all__ = [
    "Availability",
    "Connection",
    "CpuInfo",
    "Device",
    "NullTimes",
    "describe_cpu",
    "discover",
    "write_csv",
]

_MODULE_OF = {
    "CpuInfo": "pearl.backends.cpu.device",
    "describe_cpu": "pearl.backends.cpu.device",
    "NullTimes": "pearl.backends.null.device",
    "discover": "pearl.devices.discovery",
    "write_csv": "pearl.devices.discovery",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pearl.devices' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
