"""Find the devices of this machine, measure the links between them, and write both CSV files."""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pearl.atomic_file import write_text
from pearl.devices import cuda, sycl
from pearl.devices.cpu import cpu_device, describe_cpu, measure_memory_bandwidth, measure_memory_latency_us
from pearl.devices.description import CONNECTION_COLUMNS, DEVICE_COLUMNS, Connection, Device
from pearl.errors import ConfigurationError, DeviceError

log = logging.getLogger(__name__)

# What is taken where nothing is measured: PCIe 3.0 x16 with its driver, and a load from memory.
HOST_LINK_LATENCY_US = 10.0
HOST_LINK_GBPS = 12.0
MEMORY_LATENCY_US = 0.1
# ... and where host and device are one piece of silicon: a copy that the runtime makes.
SHARED_LINK_LATENCY_US = 3.0
SHARED_LINK_GBPS = 10.0


def _silent(_message: str) -> None:
    return None


def discover(
    measure: bool = True, progress: Callable[[str], None] | None = None, *, own_silicon: bool = False
) -> tuple[list[Device], list[Connection]]:
    """List this machine's devices, the CPU first, and their connections.

    With `measure` off nothing is timed: bandwidths stay empty and host links carry the defaults above. A device that
    fails is reported to `progress` and to the log, and left out. SYCL's CPU device and the FPGA emulator come with
    `shares_with`: they compute on the CPU. With `own_silicon` these are named to `progress` and left out; the SYCL
    runtime is then loaded only where there may be a GPU or a board for it.
    """
    report = progress or _silent
    info = describe_cpu()
    report(f"CPU: {info.model}, {info.logical_cores} logical and {info.physical_cores} physical cores usable")
    bandwidth: float | None = None
    connections: list[Connection] = []
    if measure:
        report("Measuring the memory bandwidth of the CPU")
        bandwidth = round(measure_memory_bandwidth(info), 2)
        latency = measure_memory_latency_us(info)
        if latency is None:
            log.warning("The native kernels are not built: the latency of the CPU's memory is taken as 0.1 us.")
        host_latency = round(MEMORY_LATENCY_US if latency is None else latency, 4)
        connections.append(Connection("cpu0", "cpu0", host_latency, bandwidth))
    devices = [cpu_device(info, "cpu0", bandwidth)]
    cuda_devices, cuda_links = _discover_cuda(measure, report)
    sycl_devices, sycl_links = _discover_sycl(devices[0], connections, measure, report, own_silicon)
    return devices + cuda_devices + sycl_devices, connections + cuda_links + sycl_links


def _discover_cuda(measure: bool, report: Callable[[str], None]) -> tuple[list[Device], list[Connection]]:
    devices: list[Device] = []
    links: list[Connection] = []
    indices: list[int] = []
    facts = cuda.query_smi()
    index = 0
    while (available := cuda.cuda_availability(index)).ok:
        name = f"gpu{index}"
        try:
            device = cuda.describe_cuda(index, name, facts, measure=measure)
            if measure:
                report(f"Measuring the links of {name}")
                own_links = cuda.measure_host_links(index, "cpu0", name)
                if device.memory_bandwidth_gbps:
                    # Not the latency of a copy: its launch is part of what the primitives measure on the device.
                    own_links.append(Connection(name, name, MEMORY_LATENCY_US, device.memory_bandwidth_gbps))
            else:
                own_links = [Connection("cpu0", name, HOST_LINK_LATENCY_US, HOST_LINK_GBPS)]
        except (RuntimeError, AssertionError, ConfigurationError) as error:
            report(f"{name} is left out: {error}")
            log.warning("CUDA device %d is left out: %s", index, error)
        else:
            report(f"GPU: {name}, {device.cores} multiprocessors, {device.memory_gb} GB")
            devices.append(device)
            links += own_links
            indices.append(index)
        index += 1
    if index == 0:
        report(f"No CUDA device: {available.reason}")
    if measure:
        links += _peer_links(devices, indices, report)
    return devices, links


def _peer_links(devices: list[Device], indices: list[int], report: Callable[[str], None]) -> list[Connection]:
    links: list[Connection] = []
    for first, source in zip(indices, devices, strict=True):
        for second, target in zip(indices, devices, strict=True):
            if first == second:
                continue
            try:
                link = cuda.measure_peer_link(first, second, source.name, target.name)
            except (RuntimeError, AssertionError) as error:
                report(f"The link {source.name} -> {target.name} is left out: {error}")
                log.warning("The link %s -> %s is left out: %s", source.name, target.name, error)
                continue
            links += [link] if link else []
    return links


def _discover_sycl(
    host: Device, memory: Sequence[Connection], measure: bool, report: Callable[[str], None], own_silicon: bool
) -> tuple[list[Device], list[Connection]]:
    """The SYCL devices beside `host`, the latency of whose own memory is the first of `memory`."""
    if own_silicon:
        if names := sycl.devices_on_the_cpu():
            left_out = ", ".join(names)
            report(f"Left out, being {host.name} itself: {left_out} (a device file that names them has them used)")
        if not sycl.accelerators_possible():
            return [], []
    try:
        present = sycl.sycl_devices()
    except DeviceError as error:
        report(f"No SYCL device: {error}")
        return [], []
    devices: list[Device] = []
    links: list[Connection] = []
    numbers: Counter[str] = Counter()
    for facts in present:
        shares = facts.kind == "cpu" or facts.emulated
        if shares and own_silicon:
            continue
        stem = "fpga_emu" if facts.emulated else "fpga" if facts.kind == "fpga" else f"sycl:{facts.kind}"
        name = f"{stem}{numbers[stem]}"
        try:
            if measure:
                report(f"Measuring the memory and the links of {name}")
            device = sycl.describe_sycl(facts.selector, name, measure=measure)
            if shares:
                watts = None if facts.emulated else host.active_watts
                device = dataclasses.replace(device, shares_with=host.name, active_watts=watts)
            own_links = _sycl_links(device, host, memory, measure)
        except (DeviceError, RuntimeError) as error:
            report(f"{name} is left out: {error}")
            log.warning("The SYCL device %s is left out: %s", facts.selector, error)
            continue
        numbers[stem] += 1
        report(f"SYCL: {name}, {facts.described}, {device.cores} compute units")
        devices.append(device)
        links += own_links
    return devices, links


def _sycl_links(device: Device, host: Device, memory: Sequence[Connection], measure: bool) -> list[Connection]:
    if not measure:
        shares = device.shares_with == host.name
        latency, gbps = (SHARED_LINK_LATENCY_US, SHARED_LINK_GBPS) if shares else (HOST_LINK_LATENCY_US, HOST_LINK_GBPS)
        return [Connection(host.name, device.name, latency, gbps)]
    links = sycl.measure_host_links(device.selector, host.name, device.name)
    if device.memory_bandwidth_gbps:
        latency = memory[0].latency_us if device.shares_with and memory else MEMORY_LATENCY_US
        links.append(Connection(device.name, device.name, latency, device.memory_bandwidth_gbps))
    return links


def _cell(value: object) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def write_csv(
    devices: Sequence[Device],
    connections: Sequence[Connection],
    device_path: str | Path,
    connection_path: str | Path,
) -> None:
    """Write the device CSV and the connection CSV; ConfigurationError names a path that cannot be written."""
    tables: tuple[tuple[str | Path, tuple[str, ...], Sequence[object]], ...] = (
        (device_path, DEVICE_COLUMNS, devices),
        (connection_path, CONNECTION_COLUMNS, connections),
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
