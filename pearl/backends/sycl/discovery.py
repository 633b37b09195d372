"""Find SYCL devices and measure their links. A device that fails is reported and left out."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

from pearl.backends.links import (
    HOST_LINK_GBPS,
    HOST_LINK_LATENCY_US,
    MEMORY_LATENCY_US,
    SHARED_LINK_GBPS,
    SHARED_LINK_LATENCY_US,
)
from pearl.backends.protocol import Discovered, Discovery
from pearl.backends.sycl import device as sycl
from pearl.devices.description import Connection, Device
from pearl.errors import DeviceError

log = logging.getLogger(__name__)


def discover(search: Discovery) -> Discovered:
    """The devices that the runtime lists, including FPGAs, and their links to the host.

    Devices that compute on the CPU get `shares_with`. With `own_silicon` they are reported and left out, and the
    runtime is loaded only if there may be a GPU or a board.
    """
    host, measure, report, own_silicon = search.host, search.measure, search.report, search.own_silicon
    assert host is not None
    if own_silicon:
        if names := sycl.devices_on_the_cpu():
            left_out = ", ".join(names)
            report(f"Left out, being {host.name} itself: {left_out} (a device file that names them has them used)")
        if not sycl.accelerators_possible():
            return Discovered()
    try:
        present = sycl.sycl_devices()
    except DeviceError as error:
        report(f"No SYCL device: {error}")
        return Discovered()
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
            own_links = _links(device, host, search.memory, measure)
        except (DeviceError, RuntimeError) as error:
            report(f"{name} is left out: {error}")
            log.warning("The SYCL device %s is left out: %s", facts.selector, error)
            continue
        numbers[stem] += 1
        report(f"SYCL: {name}, {facts.described}, {device.cores} compute units")
        devices.append(device)
        links += own_links
    return Discovered(devices, links)


def _links(device: Device, host: Device, memory: Sequence[Connection], measure: bool) -> list[Connection]:
    if not measure:
        shares = device.shares_with == host.name
        latency, gbps = (SHARED_LINK_LATENCY_US, SHARED_LINK_GBPS) if shares else (HOST_LINK_LATENCY_US, HOST_LINK_GBPS)
        return [Connection(host.name, device.name, latency, gbps)]
    links = sycl.measure_host_links(device.selector, host.name, device.name)
    if device.memory_bandwidth_gbps:
        latency = memory[0].latency_us if device.shares_with and memory else MEMORY_LATENCY_US
        links.append(Connection(device.name, device.name, latency, device.memory_bandwidth_gbps))
    return links
