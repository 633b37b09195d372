"""Find the devices of this machine, measure the links between them, and write both CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from pearl.atomic_file import write_text
from pearl.devices.description import (
    CONNECTION_COLUMNS,
    DEVICE_COLUMNS,
    NEEDED_CONNECTION_COLUMNS,
    Connection,
    Device,
)
from pearl.errors import ConfigurationError


def discover(
    measure: bool = True, progress: Callable[[str], None] | None = None, *, own_silicon: bool = False
) -> tuple[list[Device], list[Connection]]:
    """List this machine's devices, the CPU first, and their connections, backend by backend.

    Without `measure` nothing is timed: bandwidths stay empty and host links get the defaults of `pearl.backends.links`.
    A device that fails is reported to `progress` and to the log, and left out. SYCL's CPU device and the FPGA emulator
    compute on the CPU and get `shares_with`. With `own_silicon` they are reported and left out, and the SYCL runtime is
    loaded only if there may be a GPU or a board.
    """
    from pearl.backends import backends
    from pearl.backends.protocol import Discovery

    devices: list[Device] = []
    connections: list[Connection] = []
    for backend in backends():
        host = devices[0] if devices else None
        memory = [link for link in connections if host is not None and link.source == link.target == host.name]
        found = backend.discover(Discovery(measure, progress or (lambda _: None), own_silicon, host, memory))
        devices += found.devices
        connections += found.connections
    return devices, connections


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
