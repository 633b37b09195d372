"""Devices of other machines: their times come from imported measurements alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from composer.calibration import SIZES, SOFTWARE, CalibrationKey, CalibrationStore, Entry
from composer.interpolation import interpolate
from composer.measurement import Measurement
from composer.platform import Platform, usable
from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.errors import ConfigurationError, DeviceError, PlacementError
from pearl.spec import Scalar

_USER_FILES = {"trainer_source": "the trainer's file", "env_source": "the environment's file"}


class NotCalibratedError(DeviceError):
    """A measurement of an absent device was not imported."""


def imported_times(store: CalibrationStore, key: CalibrationKey, names: Sequence[str]) -> dict[str, Measurement] | None:
    """The measurements `names` of an absent device, by name: of the sizes in `key`, or interpolated; None if unknown.

    Those of one version of the software are taken: of this one's if there are any, else of the one with the most sizes.
    A note says which other version, and how a value was interpolated.
    """
    versions: dict[tuple[object, ...], list[Entry]] = {}
    for entry in store.similar(key):
        if set(names) <= {name for name, _ in entry.measurements}:
            versions.setdefault(_software(entry.key), []).append(entry)
    if not versions:
        return None
    entries = max(versions.values(), key=lambda found: (*_matches(found[0].key, key), len(found)))
    at = _sizes(key)
    points = {_sizes(entry.key): dict(entry.measurements) for entry in entries}
    found = {name: interpolate({size: measured[name] for size, measured in points.items()}, *at) for name in names}
    note = _software_note(entries[0].key, key)
    return {
        name: dataclasses.replace(m, source="imported", note="; ".join(filter(None, (m.note, note))))
        for name, m in found.items()
    }


def not_calibrated(store: CalibrationStore, device: Device, what: str) -> NotCalibratedError:
    """The error for a measurement that an absent device lacks; `what` names it."""
    return NotCalibratedError(
        f"{device.name} is not on this machine, and {store.path} has no imported measurement of {what} on it "
        f"(calibration {device.calibration}). On its machine: pearl calibrate SPEC --export FILE; here: "
        "pearl calibrate --import FILE"
    )


def check_absent(platform: Platform, store: CalibrationStore) -> None:
    """Raise for an absent device without imported measurements, or with the calibration of another kind of device.

    ConfigurationError also for absent and present devices that share their silicon.
    """
    for device in platform.devices:
        if not device.absent:
            continue
        measured = _measured(store, device.calibration)
        if measured is not None and not _alike(measured, device):
            raise ConfigurationError(
                f"{device.name} is a {device.kind} of backend {device.backend}, and its calibration "
                f"{device.calibration} is of {measured.name}, a {measured.kind} of backend {measured.backend}. "
                f"{_choices(store, device)}"
            )
        if not store.has_device(device.calibration) and backend_of(device).estimator(device) is None:
            here = dataclasses.replace(device, calibration="")
            raise PlacementError(
                f"{device.name} is of another machine: its calibration is {device.calibration}, the {device.kind} here "
                f"has {here.fingerprint()}. {store.path} has no measurement of it. Import one with pearl calibrate "
                f"--import FILE, or leave the calibration empty to measure the device of this machine. "
                f"{_choices(store, device)}"
            )
        for other in platform.devices:
            if not other.absent and platform.shared_silicon(device.name, other.name):
                raise ConfigurationError(
                    f"{device.name} and {other.name} are one piece of silicon, but the calibration of {device.name} is "
                    f"of another machine, and that of {other.name} is not. State both, or neither."
                )


def unlike_measured(platform: Platform, store: CalibrationStore) -> list[str]:
    """A line for each device of this machine that the store knows only other hardware of the same kind for."""
    lines = []
    for device in usable(platform)[0]:
        backend = backend_of(device)
        if device.absent or not backend.is_here or backend.estimator(device) or store.has_device(device.fingerprint()):
            continue
        if others := _measured_alike(store, device):
            listed = ", ".join(f"{name} {fingerprint}" for fingerprint, name in others.items())
            lines.append(
                f"{device.name} has the fingerprint {device.fingerprint()}; measurements of other hardware in "
                f"{store.path} ({listed}) do not apply to it"
            )
    return lines


def _measured(store: CalibrationStore, fingerprint: str) -> Device | None:
    """The newest row of a measured device with this fingerprint."""
    devices = (device for machine in reversed(store.machines) for device in machine.devices)
    return next((device for device in devices if device.calibration == fingerprint), None)


def _alike(first: Device, second: Device) -> bool:
    """Whether measurements of one may be those of the other."""
    return first.kind == second.kind and backend_of(first) is backend_of(second)


def _measured_alike(store: CalibrationStore, device: Device) -> dict[str, str]:
    """The names of the measured devices of the same kind and backend, by fingerprint."""
    devices = (other for machine in store.machines for other in machine.devices)
    return {other.calibration: other.name for other in devices if _alike(other, device)}


def _choices(store: CalibrationStore, device: Device) -> str:
    """The calibrations that the device could have, in words."""
    known = _measured_alike(store, device)
    listed = ", ".join(f"{fingerprint} ({name})" for fingerprint, name in known.items())
    return f"Measured for a {device.kind} of backend {device.backend}: {listed or 'none'}."


def _sizes(key: CalibrationKey) -> tuple[int, int]:
    """Batch size and capacity; 1 where nothing depends on them, or where a file states no size."""
    found = dict(key.parameters)
    batch_size, capacity = (found.get(name) for name in SIZES)
    return _size(batch_size), _size(capacity)


def _size(value: Scalar | None) -> int:
    return value if isinstance(value, int) and value >= 1 else 1


def _software(key: CalibrationKey) -> tuple[object, ...]:
    hashes = tuple(item for item in key.parameters if item[0] in SOFTWARE)
    return (key.pearl_version, key.torch_version, key.kernel_hash, hashes)


def _matches(theirs: CalibrationKey, ours: CalibrationKey) -> tuple[bool, ...]:
    """Whether the version of PEARL is the same, and each of the user's files."""
    of_theirs, of_ours = dict(theirs.parameters), dict(ours.parameters)
    return (theirs.pearl_version == ours.pearl_version, *(of_theirs.get(f) == of_ours.get(f) for f in _USER_FILES))


def _software_note(theirs: CalibrationKey, ours: CalibrationKey) -> str:
    what = (f"PEARL {theirs.pearl_version}", *_USER_FILES.values())
    same = _matches(theirs, ours)
    return "; ".join(f"other software: {words}" for words, is_same in zip(what, same, strict=True) if not is_same)
