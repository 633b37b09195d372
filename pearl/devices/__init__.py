"""Devices: what they are, which exist on this machine, and the CSV files that describe them."""

from pearl.devices.cpu import CpuInfo, describe_cpu
from pearl.devices.description import Availability, Connection, Device
from pearl.devices.discovery import discover, write_csv
from pearl.devices.null import NullTimes

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
