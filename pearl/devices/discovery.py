"""Find the devices of this machine, measure the links between them, and write both CSV files."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pearl.atomic_file import write_text
from pearl.devices.description import (
    CONNECTION_COLUMNS,
    DEVICE_COLUMNS,
    NEEDED_CONNECTION_COLUMNS,
    Connection,
    Device,
)
from pearl.devices.power import PowerMeter
from pearl.errors import ConfigurationError, DeviceError

REST_S = 1.0


def discover(
    measure: bool = True, progress: Callable[[str], None] | None = None, *, own_silicon: bool = False
) -> tuple[list[Device], list[Connection]]:
    """List this machine's devices, the CPU first, and their connections, backend by backend.

    Without `measure` nothing is timed: bandwidths stay empty and host links get the defaults of `pearl.backends.links`.
    A device that fails is reported to `progress` and to the log, and left out. SYCL's CPU device and the FPGA emulator
    compute on the CPU and get `shares_with`. With `own_silicon` they are reported and left out, and the SYCL runtime is
    loaded only if there may be a GPU or a board. With `measure`, devices that have an energy counter get the power that
    they draw at rest as `idle_watts`.
    """
    from pearl.backends import backends
    from pearl.backends.protocol import Discovery

    report = progress or (lambda _: None)
    devices: list[Device] = []
    connections: list[Connection] = []
    for backend in backends():
        host = devices[0] if devices else None
        memory = [link for link in connections if host is not None and link.source == link.target == host.name]
        found = backend.discover(Discovery(measure, report, own_silicon, host, memory))
        devices += found.devices
        connections += found.connections
    return (_with_idle_watts(devices, report) if measure else devices), connections


def _with_idle_watts(devices: Sequence[Device], report: Callable[[str], None]) -> list[Device]:
    """The devices with the power that their counters count while this process sleeps."""
    from pearl.backends import backend_of

    meters: dict[str, PowerMeter] = {}
    for device in devices:
        try:
            meter = backend_of(device).power_meter(device)
        except DeviceError as error:
            report(f"The power of {device.name} is not measured: {error}")
            continue
        if meter is not None and all(meter.counter != other.counter for other in meters.values()):
            meters[device.name] = meter
    if not meters:
        return list(devices)
    report(f"Measuring the power of {', '.join(meters)} at rest")
    try:
        before, began = {name: meter.joules() for name, meter in meters.items()}, time.monotonic()
        time.sleep(REST_S)
        seconds = time.monotonic() - began
        watts = {name: (meter.joules() - before[name]) / seconds for name, meter in meters.items()}
    except DeviceError as error:
        report(f"The power at rest is not measured: {error}")
        return list(devices)
    return [
        replace(device, idle_watts=round(watts[device.name], 1)) if device.name in watts else device
        for device in devices
    ]


def _cell(value: object) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def write_csv(
    devices: Sequence[Device],
    connections: Sequence[Connection],
    device_path: str | Path,
    connection_path: str | Path,
) -> None:
    """Write the device CSV and the connection CSV; ConfigurationError names a path that cannot be written."""
    stated = any(link.active_watts is not None for link in connections)
    link_columns = CONNECTION_COLUMNS if stated else NEEDED_CONNECTION_COLUMNS
    tables: tuple[tuple[str | Path, tuple[str, ...], Sequence[object]], ...] = (
        (device_path, DEVICE_COLUMNS, devices),
        (connection_path, link_columns, connections),
    )
    for path, columns, rows in tables:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(getattr(row, column)) for column in columns] for row in rows)
        try:
            write_text(path, text.getvalue())
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written: {error.strerror or error}. Name a file in an existing, writable folder."
            ) from error
