"""A machine in the calibration store: its devices with their fingerprints, and its measured connections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from composer.calibration import CalibrationStore, Machine
from composer.platform import Platform, usable
from pearl import __version__
from pearl.backends import backend_of
from pearl.devices.description import Device


def machine_of(platform: Platform, *, discovered: bool) -> Machine | None:
    """The record of a platform that was profiled here: its usable devices. None if a device is of another machine."""
    if any(device.absent for device in platform.devices):
        return None
    devices = tuple(_with_fingerprint(device) for device in usable(platform)[0])
    names = {device.name for device in devices}
    links = tuple(link for link in platform.connections if {link.source, link.target} <= names)
    return Machine(devices, links, __version__, discovered=discovered)


def discovered_before(devices: Sequence[Device], store: CalibrationStore) -> Platform | None:
    """`devices` of this machine with the bandwidths and connections that an earlier discovery of them measured.

    None if this version of PEARL has not measured exactly these devices, or if the store is to measure all again.
    """
    wanted = {device.name: device.fingerprint() for device in devices}
    for machine in reversed(store.machines):
        if not machine.discovered or machine.imported or machine.pearl_version != __version__:
            continue
        if not store.is_current(machine):
            continue
        known = {device.name: device for device in machine.devices}
        if {name: device.calibration for name, device in known.items()} == wanted:
            rows = (dataclasses.replace(known[d.name], memory_gb=d.memory_gb, calibration="") for d in devices)
            return Platform(tuple(rows), machine.connections)
    return None


def _with_fingerprint(device: Device) -> Device:
    if not backend_of(device).is_here:  # never measured
        return device
    return dataclasses.replace(device, calibration=device.fingerprint())
