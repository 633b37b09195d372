"""The platform: the devices and connections of two CSV files, and the cost of a transfer between two devices.

The files are data: a cell is compared, matched or converted to a number, never executed. One DeviceFileError reports
all faults of a file, each with its line and column. `docs/csv_reference.md` describes the files for users.
"""

from __future__ import annotations

import csv
import io
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from composer.wording import did_you_mean, listed, shortened
from pearl.backends import backend_of, csv_names, hosts_actors
from pearl.backends.cpu.device import cpu_device, describe_cpu
from pearl.devices.description import (
    CONNECTION_COLUMNS,
    DEVICE_COLUMNS,
    KINDS,
    MAY_BE_ZERO,
    NAME_PATTERN,
    NAME_RULE,
    NEEDED_CONNECTION_COLUMNS,
    NODE_PATTERN,
    NODE_RULE,
    QUANTITIES,
    Connection,
    Device,
    check_calibration,
    check_selector,
)
from pearl.errors import ConfigurationError, DeviceFileError, PlacementError

# Latency of a device's own memory where no connection row states it.
OWN_MEMORY_LATENCY_US = 0.1

# The placement computes and lists the cost of every pair of devices: 64 devices make 4,096 pairs for each Learner.
MOST_DEVICES = 64
_ERRORS_SHOWN = 10
_LARGEST_FILE = 1 << 20
_MOST_CELLS = 256  # of a line
_SMALLEST, _LARGEST = 1e-12, 1e15  # of any quantity; sums of transfer times outside are meaningless
_BYTES_PER_US_PER_GBPS = 1e3  # 1 GB/s moves 10^9 bytes in 10^6 us
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,12}", re.ASCII)
_WHOLE_COLUMNS = ("cores", "dsp", "luts")
_TEXT_COLUMNS = ("name", "selector", "shares_with", "calibration", "node")


def _spellings(quantity: str, **factors: float) -> dict[str, tuple[str, float]]:
    canonical = f"{quantity}_{next(unit for unit, factor in factors.items() if factor == 1.0)}"
    return {f"{quantity}_{unit}": (canonical, factor) for unit, factor in factors.items()}


# Accepted header -> (its column, factor to the unit of that column). All prefixes are decimal.
_SPELLINGS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {column: (column, 1.0) for column in (*DEVICE_COLUMNS, *CONNECTION_COLUMNS)}
    | _spellings("latency", us=1.0, ms=1e3, ns=1e-3, s=1e6)
    | _spellings("bandwidth", gbps=1.0, mbps=1e-3)
    | _spellings("memory_bandwidth", gbps=1.0, mbps=1e-3)
    | _spellings("memory", gb=1.0, mb=1e-3)
    | _spellings("sram", kb=1.0, mb=1e3)
    | _spellings("clock", mhz=1.0, ghz=1e3)
)


def _spellings_of(column: str) -> tuple[str, ...]:
    return tuple(header for header, (canonical, _) in _SPELLINGS.items() if canonical == column)


@dataclass
class _Faults:
    """All faults of one file, raised together."""

    path: Path
    messages: list[tuple[int, str]] = field(default_factory=list)  # each with its line

    def add(self, line: int, column: str, expected: str, found: str, advice: str = "") -> None:
        place = f"line {line}, column '{column}'" if column else f"line {line}"
        self.messages.append((line, f"{place}: expected {expected}; found {shortened(found)!r}.{advice}"))

    def raise_if_any(self) -> None:
        if not self.messages:
            return
        count = len(self.messages)
        in_order = sorted(self.messages, key=operator.itemgetter(0))
        shown = "\n".join(f"  {message}" for _, message in in_order[:_ERRORS_SHOWN])
        rest = f"\n  and {count - _ERRORS_SHOWN} more" if count > _ERRORS_SHOWN else ""
        errors = "1 error" if count == 1 else f"{count} errors"
        raise DeviceFileError(f"{self.path}: {errors}.\n{shown}{rest}")


@dataclass(frozen=True)
class _Row:
    """One row of a file; its methods read a cell and note what is wrong with it."""

    line: int
    cells: Mapping[str, str]  # header as spelled in the file (lower case) -> stripped text
    headers: Mapping[str, str]  # column -> header as spelled in the file
    faults: _Faults

    def fault(self, column: str, expected: str, advice: str = "") -> None:
        self.faults.add(self.line, self.headers.get(column, column), expected, self.text(column), advice)

    def text(self, column: str) -> str:
        return self.cells.get(self.headers.get(column, ""), "")

    def one_of(self, column: str, accepted: Sequence[str]) -> str:
        value = self.text(column).lower()
        if value not in accepted:
            self.fault(column, f"one of {', '.join(accepted)}", did_you_mean(value, accepted))
            return ""
        return value

    def number(self, column: str, *, required: bool = False, zero_allowed: bool = False) -> float | None:
        text = self.text(column)
        if not text:
            if required:
                self.fault(column, "a number")
            return None
        value, expected = _number(text, self.headers[column], zero_allowed=zero_allowed)
        if value is None:
            self.fault(column, expected)
        return value


def _text_of(path: Path) -> str:
    """The file's text with comment lines blanked, so that lines keep their numbers."""
    try:
        data = path.read_bytes()
    except IsADirectoryError as error:
        raise DeviceFileError(f"{path} is a folder; expected a CSV file. Name the file inside it.") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DeviceFileError(
            f"{path} cannot be read: {reason}. `pearl devices` writes both CSV files for the machine it runs on."
        ) from error
    if len(data) > _LARGEST_FILE:
        raise DeviceFileError(
            f"{path} holds {len(data):,} bytes; expected one row per device, {_LARGEST_FILE:,} bytes at most."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DeviceFileError(
            f"{path}, line {line}: expected UTF-8 text; found byte 0x{data[error.start]:02x}. "
            "Save the file as UTF-8 (in a spreadsheet: 'CSV UTF-8')."
        ) from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DeviceFileError(f"{path}, line {line}: expected text; found a zero byte. Save the file as UTF-8 CSV.")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("" if line.lstrip().startswith("#") else line for line in lines)


def _cells_of(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """Line number and stripped cells of each line that is not blank."""
    try:
        # With a line break at the end, a cell whose quote is not closed contains one.
        rows = list(csv.reader(io.StringIO(f"{text}\n"), skipinitialspace=True))
    except csv.Error as error:
        raise DeviceFileError(
            f'{path} is not a CSV file: {error}. Check for a quote (") that is not closed.'
        ) from error
    numbered = []
    for line, row in enumerate(rows, start=1):
        if any("\n" in cell for cell in row):
            raise DeviceFileError(
                f"{path}, line {line}: a quoted cell runs over several lines, or its quote is not closed. Close it."
            )
        if len(row) > _MOST_CELLS:
            raise DeviceFileError(f"{path}, line {line}: expected {_MOST_CELLS} cells at most; found {len(row):,}.")
        cells = [cell.strip() for cell in row]
        if any(cells):
            numbered.append((line, cells))
    if not numbered:
        raise DeviceFileError(f"{path} is empty; expected a header line and one row per entry.")
    return numbered


def _read_table(path: Path, columns: Sequence[str], required: Sequence[str], faults: _Faults) -> tuple[int, list[_Row]]:
    """The line of the header, and the rows."""
    numbered = _cells_of(path, _text_of(path))
    header_line, header = numbered[0]
    while header and not header[-1]:
        header.pop()
    spelled = [name.lower() for name in header]
    if len(spelled) == 1 and (";" in spelled[0] or "\t" in spelled[0]):
        faults.add(header_line, "", "cells separated by commas", header[0], " Export the file with commas.")
        faults.raise_if_any()
    headers = _check_header(header_line, spelled, columns, required, faults)
    faults.raise_if_any()
    rows = []
    for line, cells in numbered[1:]:
        extra = [cell for cell in cells[len(spelled) :] if cell]
        if extra:
            expected = f"{len(spelled)} cells, as in the header"
            faults.add(line, "", expected, extra[0], " Remove the surplus cell, or quote a cell that holds a comma.")
        rows.append(_Row(line, dict(zip(spelled, cells, strict=False)), headers, faults))
    return header_line, rows


def _check_header(
    line: int, spelled: Sequence[str], columns: Sequence[str], required: Sequence[str], faults: _Faults
) -> dict[str, str]:
    """The header of each column, as spelled in the file."""
    accepted = {header: canonical for header, (canonical, _) in _SPELLINGS.items() if canonical in columns}
    units = {header.rpartition("_")[0]: canonical for header, canonical in accepted.items() if header != canonical}
    headers: dict[str, str] = {}
    stated: set[str] = set()
    for name in spelled:
        canonical = accepted.get(name)
        if canonical is None and name in units:
            stated.add(units[name])
            faults.add(line, name, f"a header with its unit, one of {', '.join(_spellings_of(units[name]))}", name)
        elif canonical is None:
            known = ", ".join(columns)
            advice = did_you_mean(name, accepted) or " Remove the column, or correct its name."
            faults.add(line, name, f"one of {known}", name, advice)
        elif canonical in headers:
            both = f"{headers[canonical]}, {name}"
            faults.add(line, name, f"{canonical} to be given once", both, " Keep one of the columns.")
        else:
            headers[canonical] = name
    for column in required:
        if column not in headers and column not in stated:
            choices = " or ".join(_spellings_of(column))
            faults.add(line, column, f"a column {choices}", ", ".join(spelled), " Add it to the header.")
    return headers


def _number(text: str, header: str, *, zero_allowed: bool) -> tuple[float | None, str]:
    """The number in its column's unit and an empty text, or None and the expected value in words."""
    canonical, factor = _SPELLINGS[header]
    bound = "of at least 0" if zero_allowed else "above 0"
    if canonical in _WHOLE_COLUMNS:
        whole = int(text) if _WHOLE.fullmatch(text) else -1
        if whole < 0 or (whole == 0 and not zero_allowed):
            return None, f"a whole number {bound}, below 10^12"
        return whole, ""
    if not _NUMBER.fullmatch(text):
        if re.match(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?\s*[A-Za-z]", text):
            return None, f"a plain number (the unit belongs in the header '{header}')"
        if re.fullmatch(r"[0-9]+,[0-9]+", text):
            return None, "a number with a decimal point, not a comma"
        return None, f"a number {bound}"
    value = float(text) * factor
    if value < 0 or (value == 0 and not zero_allowed):
        return None, f"a number {bound}"
    if value and not _SMALLEST <= value <= _LARGEST:
        return None, f"a number from {_SMALLEST:g} to {_LARGEST:g} {canonical.rpartition('_')[2]}"
    return value, ""


def read_devices(path: str | Path) -> tuple[Device, ...]:
    """Read the device CSV; raises DeviceFileError with every fault of the file."""
    faults = _Faults(Path(path))
    header_line, rows = _read_table(Path(path), DEVICE_COLUMNS, ("name", "kind", "backend"), faults)
    if not rows:
        faults.add(header_line + 1, "", "one row per device", "the header alone", " Add the devices.")
    if len(rows) > MOST_DEVICES:
        advice = " Every pair of devices is costed: list each device once, and only as many equal ones as are needed."
        faults.add(rows[MOST_DEVICES].line, "", f"at most {MOST_DEVICES} devices", f"{len(rows)} rows", advice)
        faults.raise_if_any()
    found: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    nodes: dict[str, int] = {}
    for row in rows:
        found.append(_device_values(row))
        if (node := row.text("node")) and node in nodes:
            row.fault("node", "one row for each node", f" Line {nodes[node]} is of this node already.")
        nodes.setdefault(node, row.line)
        name = row.text("name")
        if name in lines:
            row.fault("name", "each name once", f" Line {lines[name]} already has this name: rename one of them.")
        lines.setdefault(name, row.line)
    for row in rows:
        shared = row.text("shares_with")
        if shared and shared == row.text("name"):
            row.fault("shares_with", "another device", " Leave the cell empty for a device of its own silicon.")
        elif shared and shared not in lines:
            advice = did_you_mean(shared, lines) or " Add the device, or correct the name."
            row.fault("shares_with", f"a device of this file ({listed(list(lines))})", advice)
    faults.raise_if_any()
    return tuple(Device(**values) for values in found)


def _can_run_actors(kind: Any, backend: str, selector: str) -> bool:
    return hosts_actors(Device("device", kind, backend, selector=selector))


def _device_values(row: _Row) -> dict[str, Any]:
    values: dict[str, Any] = {column: row.text(column) for column in _TEXT_COLUMNS}
    if not NAME_PATTERN.fullmatch(values["name"]):
        row.fault("name", NAME_RULE)
    kind = values["kind"] = row.one_of("kind", KINDS)
    backend = values["backend"] = row.one_of("backend", csv_names())
    if kind and backend:
        fitting = csv_names(kind)  # type: ignore[arg-type]  # one_of returned one of KINDS
        if backend not in fitting:
            row.fault("backend", f"a backend of a {kind}: {', '.join(fitting)}")
        try:
            check_selector(kind, backend, values["selector"])  # type: ignore[arg-type]  # one of KINDS
        except ConfigurationError as error:
            row.fault("selector", f"a selector of the {backend} backend", f" {error}")
        else:
            if values["node"] and backend in fitting and not _can_run_actors(kind, backend, values["selector"]):
                row.fault("node", f"nothing, as Actors cannot run on a {kind}", " Nothing else runs there.")
        if backend in fitting and values["calibration"]:
            try:
                check_calibration(kind, backend, values["calibration"])  # type: ignore[arg-type]  # one of KINDS
            except ConfigurationError as error:
                row.fault("calibration", "the fingerprint of a device that was measured, or nothing", f" {error}")
    if values["node"] and not NODE_PATTERN.fullmatch(values["node"]):
        row.fault("node", NODE_RULE)
    for column in QUANTITIES:
        values[column] = row.number(column, zero_allowed=column in MAY_BE_ZERO)
    if row.text("speed") and not values["node"]:
        row.fault(
            "speed", "nothing, for a device of this machine", " It is that of a node, compared with this machine."
        )
    return values


def read_connections(path: str | Path, devices: Sequence[Device]) -> tuple[Connection, ...]:
    """Read the connection CSV of `devices`; raises DeviceFileError with every fault of the file.

    A header without rows is a machine without links. A row that repeats an earlier one is dropped.
    """
    faults = _Faults(Path(path))
    _, rows = _read_table(Path(path), CONNECTION_COLUMNS, NEEDED_CONNECTION_COLUMNS, faults)
    names = [device.name for device in devices]
    found: dict[tuple[str, str], tuple[int, Connection]] = {}
    for row in rows:
        ends = {}
        for column in ("source", "target"):
            ends[column] = row.text(column)
            if ends[column] not in names:
                advice = did_you_mean(ends[column], names) or " Add the device to the device CSV, or correct the name."
                row.fault(column, f"a device of the device CSV ({listed(names)})", advice)
        latency = row.number("latency_us", required=True, zero_allowed=True)
        bandwidth = row.number("bandwidth_gbps", required=True)
        watts = row.number("active_watts", zero_allowed=True)
        if latency is None or bandwidth is None:
            continue
        link = Connection(ends["source"], ends["target"], latency, bandwidth, watts)
        line, earlier = found.setdefault((link.source, link.target), (row.line, link))
        if earlier != link:
            advice = f" Line {line} states other values for {link.source} -> {link.target}: keep one of the rows."
            row.fault("source", "each connection once", advice)
    faults.raise_if_any()
    return tuple(link for _, link in found.values())


@dataclass(frozen=True)
class Link:
    """A route between two devices; `hops` names every device on it, including both ends.

    `latency_us` is the sum over the hops. Transfer times add up too: `bandwidth_gbps` is the bandwidth that gives their
    sum.
    """

    latency_us: float
    bandwidth_gbps: float
    hops: tuple[str, ...]

    def transfer_us(self, nbytes: float) -> float:
        """Microseconds for `nbytes` bytes: latency + size / bandwidth (T_comm of PEARL's section VI), hop by hop."""
        return self.latency_us + nbytes / (self.bandwidth_gbps * _BYTES_PER_US_PER_GBPS)


@dataclass(frozen=True)
class Node:
    """The CPU of another node of a cluster, and its connection with the host; None: not known yet."""

    device: Device
    link: Connection | None = None

    @property
    def speed(self) -> float:
        """How fast a core is compared with one of the host; 1 where that is not known."""
        return self.device.speed or 1.0


@dataclass(frozen=True)
class Platform:
    """The devices of a machine, in the order of the file, and their connections; and the `nodes` of a cluster.

    `past_host` are the connections of nodes with anything but the host and themselves.
    """

    devices: tuple[Device, ...]
    connections: tuple[Connection, ...] = ()
    nodes: tuple[Node, ...] = ()
    past_host: tuple[Connection, ...] = ()

    @classmethod
    def from_files(cls, device_path: str | Path, connection_path: str | Path) -> Platform:
        """Read both CSV files; raises DeviceFileError."""
        rows = read_devices(device_path)
        links = read_connections(connection_path, rows)
        elsewhere = {device.name for device in rows if device.node}
        here = cls(
            tuple(device for device in rows if not device.node),
            tuple(link for link in links if not elsewhere & {link.source, link.target}),
        )
        if not elsewhere:
            return here
        nodes = tuple(Node(device, here._link_to(device, links)) for device in rows if device.node)
        of_nodes = (link for link in links if elsewhere & {link.source, link.target})
        past_host = tuple(link for link in of_nodes if len({link.source, link.target, here.host.name}) == 3)
        return replace(here, nodes=nodes, past_host=past_host)

    def _link_to(self, device: Device, links: Sequence[Connection]) -> Connection | None:
        """The first of the links between the host and the device of a node."""
        ends = {self.host.name, device.name}
        return next((link for link in links if {link.source, link.target} == ends), None)

    @cached_property
    def _named(self) -> dict[str, Device]:
        return {device.name: device for device in reversed(self.devices)}  # the first of equal names wins

    def device(self, name: str) -> Device:
        """The device called `name`; PlacementError lists the known names."""
        if (found := self._named.get(name)) is not None:
            return found
        names = [device.name for device in self.devices]
        raise PlacementError(
            f"There is no device {name!r}; the platform has {listed(names)}.{did_you_mean(name, names)}"
        )

    @cached_property
    def host(self) -> Device:
        """The CPU that runs the Actors and the Host Runtime: the first of those with the best rank."""
        ranks = [
            (rank, device) for device in self.devices if (rank := backend_of(device).host_rank(device)) is not None
        ]
        if not ranks:
            raise PlacementError(
                f"No CPU among the devices ({listed([d.name for d in self.devices])}): Actors run on one. "
                "Add a row of kind cpu to the device CSV, such as 'cpu0,cpu,cpu'."
            )
        return min(ranks, key=lambda found: found[0])[1]

    def shared_silicon(self, first: str, second: str) -> bool:
        """Whether two devices are one piece of silicon, so that work on one slows the other down.

        `shares_with` is symmetric and transitive, and a device shares with itself.
        """
        return self.device(second).name in self._silicon[self.device(first).name]

    @cached_property
    def silicon(self) -> tuple[tuple[Device, ...], ...]:
        """The devices, those that are one piece of silicon together, in the order of the file."""
        groups: dict[str, list[Device]] = {}
        for device in self.devices:
            groups.setdefault(min(self._silicon[device.name]), []).append(device)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def _silicon(self) -> dict[str, set[str]]:
        """For each device, the names of all devices on the same piece of silicon."""
        groups = {device.name: {device.name} for device in self.devices}
        for device in self.devices:
            if device.shares_with in groups:
                merged = groups[device.name] | groups[device.shares_with]
                groups |= dict.fromkeys(merged, merged)
        return groups

    @cached_property
    def _rows(self) -> dict[tuple[str, str], Connection]:
        return {(link.source, link.target): link for link in self.connections}

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        return {}

    def link(self, source: str, target: str) -> Link:
        """The route from `source` to `target`.

        A row counts for both directions unless the other direction has its own row. The route from a device to itself
        is its own memory. Between two accelerators it leads through the host and costs both hops, as programs send all
        messages; a row between them counts only if their backends `talks_directly`. Where there is no route,
        PlacementError names the missing row.
        """
        if (source, target) not in self._links:
            self._links[source, target] = self._route(source, target)
        return self._links[source, target]

    def link_watts(self, source: str, target: str) -> float:
        """The power of the connection between two devices, or of a device's own memory, as far as it is stated.

        Where the two directions state different values, the higher one counts.
        """
        rows = (self._rows.get(pair) for pair in ((source, target), (target, source)))
        return max((row.active_watts or 0.0 for row in rows if row is not None), default=0.0)

    def _route(self, source: str, target: str) -> Link:
        start, end = self.device(source), self.device(target)
        direct = self._hop(start, end)
        if direct is not None and self._is_used(start, end):
            return Link(direct.latency_us, direct.bandwidth_gbps, (source,) if source == target else (source, target))
        host = self.host
        first, second = self._hop(start, host), self._hop(host, end)
        if host.name in (source, target) or first is None or second is None:
            pairs = [(source, target)]
            if host.name not in (source, target):
                pairs = [(d.name, host.name) for d, hop in ((start, first), (end, second)) if hop is None]
            rows = " and ".join(f"'{a},{b},<latency_us>,<bandwidth_gbps>'" for a, b in pairs)
            raise PlacementError(
                f"No route from {source!r} to {target!r}. Add to the connection CSV the row "
                f"{rows} (columns source,target,latency_us,bandwidth_gbps)."
            )
        bandwidth = 1.0 / (1.0 / first.bandwidth_gbps + 1.0 / second.bandwidth_gbps)
        return Link(first.latency_us + second.latency_us, bandwidth, (source, host.name, target))

    @cached_property
    def availability(self) -> tuple[tuple[Device, ...], tuple[tuple[Device, str], ...]]:
        """The usable devices; and the others, each with the reason. Backends are asked once."""
        ready: list[Device] = []
        unavailable: list[tuple[Device, str]] = []
        for device in self.devices:
            availability = device.availability()
            if availability.ok:
                ready.append(device)
            else:
                unavailable.append((device, availability.reason))
        return tuple(ready), tuple(unavailable)

    def _is_used(self, start: Device, end: Device) -> bool:
        """Whether programs use a connection between the two devices."""
        return start == end or self.host in (start, end) or backend_of(start).talks_directly(start, end)

    @property
    def unused_connections(self) -> tuple[Connection, ...]:
        """The connections between accelerators, and of nodes past the host, that programs do not use."""
        unused = (c for c in self.connections if not self._is_used(self.device(c.source), self.device(c.target)))
        return (*unused, *self.past_host)

    def _hop(self, start: Device, end: Device) -> Connection | None:
        row = self._rows.get((start.name, end.name)) or self._rows.get((end.name, start.name))
        return own_memory(start) if row is None and start.name == end.name else row


def own_memory(device: Device) -> Connection:
    """The way from a device to its own memory, where the connection CSV has no row for it."""
    bandwidth = device.memory_bandwidth_gbps or backend_of(device).usual_memory_gbps[device.kind]
    return Connection(device.name, device.name, OWN_MEMORY_LATENCY_US, bandwidth)


def with_cores_of_host(platform: Platform) -> tuple[Platform, tuple[str, ...]]:
    """The platform with the cores of local CPUs limited to those of this process; a warning for each limited CPU.

    The file may describe a larger machine, but threads that share a core only wait for each other.
    """
    here = describe_cpu().logical_cores
    devices, changed = list(platform.devices), []
    for place, device in enumerate(devices):
        if not device.absent and backend_of(device).on_host_cores(device) and (device.cores or 0) > here:
            devices[place] = replace(device, cores=here)
            changed.append(
                f"{device.name}: the device CSV states {device.cores} cores, of which this process may use {here}; "
                f"{here} are taken. Correct its cell 'cores', or run on the machine that the file describes."
            )
    return replace(platform, devices=tuple(devices)), tuple(changed)


def this_cpu() -> Device:
    """The CPU of this machine."""
    return cpu_device(describe_cpu())


def usable(platform: Platform) -> tuple[tuple[Device, ...], tuple[tuple[Device, str], ...]]:
    """The devices whose backend and hardware are available here; the other devices, each with the reason."""
    return platform.availability
